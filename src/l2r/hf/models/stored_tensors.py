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

from l2r.hf.models.weight_files import files_of_weights, named
from l2r.routers import Router

_AROUND = re.compile(r"\.(base_layer|original_module)(?=\.)")  # PEFT's, in names of tensors


def tensors_by_file(folder: Path) -> Iterator[dict[str, Tensor]]:
    """Tensors by name, one file of weights at a time; mapped, so that they are read when used."""
    yield from map(_tensors, files_of_weights(folder))


def _tensors(file: Path) -> dict[str, Tensor]:
    return load_state_dict(str(file), map_location="cpu")


def inner_model(model: nn.Module) -> Any:
    """The model of transformers inside PEFT's or another wrapper; None where there is none."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def places(
    model: nn.Module, names: Iterable[str], replaced: Collection[str] = ()
) -> dict[str, Tensor | None]:
    """The model's tensors for stored ones, as ``from_pretrained`` finds them; None for no place.

    Without the tensors of routers of ours and of modules at the paths ``replaced``, and without
    buffers that the model makes anew, such as the frequencies of a rotary embedding.
    """
    inner = inner_model(model)
    own = {_AROUND.sub("", n): tensor for n, tensor in inner.state_dict(keep_vars=True).items()}
    made = {n.rpartition(".")[2] for n, _ in inner.named_buffers() if _AROUND.sub("", n) not in own}
    routers = [path for path, part in inner.named_modules() if isinstance(part, Router)]
    others = tuple(_AROUND.sub("", f"{path}.") for path in [*routers, *replaced])
    packed = getattr(inner, "hf_quantizer", None)
    conversions = get_model_conversion_mapping(inner, hf_quantizer=packed)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    found: dict[str, Tensor | None] = {}
    for name in names:
        place, _ = rename_source_key(name, renamings, converters, inner.base_model_prefix, own)
        place = name if place not in own and name in own else place
        if place.startswith(others) or (place not in own and name.rpartition(".")[2] in made):
            continue
        found[name] = own.get(place)
    return found


def is_narrower(own: Tensor, stored: torch.dtype) -> bool:
    """Whether values of the floating-point type ``stored`` are rounded in ``own``."""
    both = own.is_floating_point() and stored.is_floating_point
    return both and torch.promote_types(own.dtype, stored) != own.dtype


def check_unchanged(model: nn.Module, folder: Path, new: Path, *, renamed: bool = False) -> None:
    """Compare two folders by bytes: what ``new`` holds besides the routers is what ``folder`` does.

    A wider dtype is no change. ``renamed`` leaves out tensors that have a place in the model and
    are not in ``new``: transformers writes a tied one once. Raises ValueError that names the
    tensors that are missing or changed.
    """
    stored = [name for part in tensors_by_file(folder) for name in part]
    found, changed = places(model, stored), list[str]()
    homes = {name: file for file in files_of_weights(new) for name in _tensors(file)}
    for tensors in tensors_by_file(folder):
        names = tensors.keys() & found.keys()
        changed += [n for n in names - homes.keys() if found[n] is None or not renamed]
        for file in {homes[name] for name in names & homes.keys()}:
            written = _tensors(file)
            both = names & written.keys()
            changed += [name for name in both if not _is_same(tensors[name], written[name])]
    if changed:
        raise ValueError(
            f"tensors besides the routers would differ from those of {folder}, please report it: "
            f"{named(sorted(changed))}"
        )


def _is_same(old: Tensor, new: Tensor) -> bool:
    if old.shape != new.shape or (old.dtype != new.dtype and is_narrower(new, old.dtype)):
        return False
    old, new = (t.to(old.dtype).reshape(-1).contiguous().view(torch.uint8) for t in (old, new))
    return torch.equal(old, new)
