"""A checkpoint of transformers' Trainer back into its model, whole.

Trainer saves a model as its family's files name the tensors, one for each expert, and loads what it
saved by ``load_state_dict(strict=False)``, which knows the model's own names alone: experts are
left as they were, and a log says so. Here the names are converted as ``from_pretrained`` does it.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import load_state_dict

from l2r.errors import InputError, blames_input
from l2r.hf.models.weight_files import UNEVEN, files_of_weights, refuse, uneven_experts
from l2r.hf.swap.sites import find_sites

_COMPILED = "_orig_mod."  # before the names that Trainer saves of a model that was compiled for it


def load_whole(trainer: Any, checkpoint: str | Path) -> bool:
    """Load the weights in a checkpoint's folder into the trainer's model; False to leave it to it.

    Stock, swapped and own models with routers are loaded here. Adapters, quantized models, FSDP
    and DeepSpeed, whose checkpoints have the model's names, are left to the trainer.
    Raises ValueError, before the model changes, naming up to three tensors of a kind, where some
    are missing, left over or of another shape, or cannot be written, on other ranks or disks.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    files = files_of_weights(Path(checkpoint))
    elsewhere = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if elsewhere or not files or not _has_names_of_a_family(model):
        return False
    places = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    try:
        _check(model, places, _stored(files, "meta"))
    except InputError as error:
        raise InputError(
            f"{checkpoint} does not hold this {type(model).__name__} whole: {error}"
        ) from error
    with torch.no_grad():
        for name, tensor in _converted(model, places, _stored(files, "cpu")):
            places[name].copy_(tensor)
    return True


def _has_names_of_a_family(model: Any) -> bool:
    """Say whether a model is a whole one of transformers or ours, with routers."""
    return (
        isinstance(model, PreTrainedModel)
        and not getattr(model, "_hf_peft_config_loaded", False)
        and getattr(model, "hf_quantizer", None) is None
        and bool(find_sites(model))
    )


def _stored(files: list[Path], device: str) -> dict[str, Tensor]:
    """Tensors of files; they are mapped, and on ``meta`` not read."""
    states = [load_state_dict(str(file), map_location=device) for file in files]
    return {n.removeprefix(_COMPILED): t for state in states for n, t in state.items()}


def _check(model: Any, places: dict[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Refuse tensors that have no place in the model, and places for which there is no tensor."""
    uneven = {UNEVEN: uneven_experts({n: tuple(t.shape) for n, t in stored.items()})}
    try:
        built = [(name, tensor.shape) for name, tensor in _converted(model, places, stored)]
    except ValueError:
        refuse(uneven)
        raise
    shapes = [
        f"{name} is {list(shape)} in the checkpoint and {list(places[name].shape)} in the model"
        for name, shape in built
        if name in places and shape != places[name].shape
    ]
    if shapes:  # identity experts, as LongCat's, have fewer matrices than others
        refuse(uneven)
    names = [name for name, _ in built]
    filled = {id(places[name]) for name in names if name in places}  # a tied matrix has two names
    refuse(
        {
            "missing": [
                name
                for name, place in places.items()
                if id(place) not in filled
                and not _matches(model._keys_to_ignore_on_load_missing, name)
            ],
            "not in the model": [name for name in names if name not in places],
            "there twice": [name for name, times in Counter(names).items() if times > 1],
            "of another shape": shapes,
            "sharded or not in memory": [
                name for name in names if name in places and _is_elsewhere(places[name])
            ],
        }
    )


def _converted(
    model: Any, places: dict[str, Tensor], stored: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Rename stored tensors to the model's, with experts joined, as ``from_pretrained`` does.

    One at a time: the matrices of one layer are in memory twice, not those of the model.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    groups: dict[tuple[str, str | None], Any] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, places
        )
        if name not in places and key in places:
            name, pattern = key, None
        if pattern is None:
            group = groups.setdefault((name, key), WeightRenaming(key, name))
        else:
            group = groups.setdefault((name, None), deepcopy(by_pattern[pattern]))
        group.add_tensor(name, key, pattern or key, stored[key])
    for (name, _), group in groups.items():
        try:
            tensors = group.convert(name, model=model, config=model.config)
        except (RuntimeError, ValueError) as error:
            if not blames_input(error):
                raise
            raise InputError(f"{name} cannot be put together: {error}") from error
        for built, tensor in tensors.items():
            yield built, tensor[0] if isinstance(tensor, list) else tensor


def _matches(patterns: Any, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())


def _is_elsewhere(place: Tensor) -> bool:
    return place.is_meta or isinstance(place, DTensor)
