"""Tensors in the files of a folder, and the places that they have in a model."""

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict

from l2r.hf.models.weight_files import files_of_weights
from l2r.routers import Router

_AROUND = re.compile(r"\.(base_layer|original_module)(?=\.)")  # PEFT's, in names of tensors


def tensors_by_file(folder: Path) -> Iterator[dict[str, Tensor]]:
    """Tensors by name, one file of weights at a time; mapped, so that they are read when used."""
    yield from map(file_tensors, files_of_weights(folder))


def file_tensors(file: Path) -> dict[str, Tensor]:
    """Tensors of one file by name, mapped."""
    return load_state_dict(str(file), map_location="cpu")


def inner_model(model: nn.Module) -> Any:
    """Return the model of transformers inside PEFT's or another wrapper; None if there is none."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def places(
    model: nn.Module, names: Iterable[str], replaced: Collection[str] = ()
) -> dict[str, Tensor | None]:
    """Find the model's tensors of stored ones, as ``from_pretrained`` does; None for no place.

    Without the tensors of routers of ours and of modules at the paths ``replaced``, and without
    buffers that the model makes anew, such as the frequencies of a rotary embedding.
    """
    inner = inner_model(model)
    own = _own_tensors(inner)
    made = {n.rpartition(".")[2] for n, _ in inner.named_buffers() if _AROUND.sub("", n) not in own}
    routers = [path for path, part in inner.named_modules() if isinstance(part, Router)]
    others = tuple(_AROUND.sub("", f"{path}.") for path in [*routers, *replaced])
    found: dict[str, Tensor | None] = {}
    for name, place in place_names(inner, names).items():
        if place.startswith(others) or (place not in own and name.rpartition(".")[2] in made):
            continue
        found[name] = own.get(place)
    return found


def place_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Names of stored tensors in the model, as ``from_pretrained`` finds them, there or not."""
    own = _own_tensors(model)
    packed = getattr(model, "hf_quantizer", None)
    conversions = get_model_conversion_mapping(model, hf_quantizer=packed)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    prefix, found = model.base_model_prefix, {}
    for name in names:
        place, _ = rename_source_key(name, renamings, converters, prefix, own)
        found[name] = name if place not in own and name in own else place
    return found


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {_AROUND.sub("", n): tensor for n, tensor in model.state_dict(keep_vars=True).items()}


def is_narrower(own: Tensor, stored: torch.dtype) -> bool:
    """Say whether values of the floating-point type ``stored`` are rounded in ``own``."""
    both = own.is_floating_point() and stored.is_floating_point
    return both and torch.promote_types(own.dtype, stored) != own.dtype
