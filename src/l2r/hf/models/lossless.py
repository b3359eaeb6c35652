"""Losses of a folder with other routers, against the folder that a model came from.

transformers leaves tensors aside at loading (MTP blocks, vision towers), opens a wrapper as its
language model alone and cannot write packed weights back. A save of the whole model is refused
here, before a fit begins or a file is written; copying.py writes folders that keep all of it.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from l2r.errors import InputError
from l2r.files.reading import read_json
from l2r.hf.models.opening import SOURCE, Source
from l2r.hf.models.quantized import (
    QUANTIZATION,
    packed_method,
    quantization_method,
    remedy,
    saved_in_memory,
)
from l2r.hf.models.stored_tensors import inner_model, is_narrower, places, tensors_by_file
from l2r.hf.models.weight_files import named

_LOST = "_l2r_lost"  # on a model that was swapped in memory: why it cannot be saved
_ADAPTER = "adapter_config.json"
_KEEP = "l2r swap without --train-steps and l2r export without --dtype keep them"
_ADAPTER_ALONE = (
    "it carries an adapter, which alone would be written, without the new routers; merge the "
    "adapter into a copy (peft's merge_and_unload) and swap that"
)


def check_whole_weights(folder: Path, name: str | Path) -> None:
    """Refuse quantized weights in a folder, called ``name`` by its user, of which all change."""
    method = quantization_method(_config(folder))
    if method:
        raise InputError(f"{name} {_lost_packed(method, name)}")


def check_parts(model: nn.Module, folder: Path, name: str | Path) -> None:
    """Refuse a model that is one part of the wrapper in ``folder``. Raises ValueError."""
    lost = _lost_parts(model, folder)
    if lost:
        raise InputError(f"{name} {lost}")


def check_whole(
    model: nn.Module,
    folder: Path,
    name: str | Path,
    *,
    replaced: Collection[str] = (),
    rounded: bool = False,
) -> None:
    """Refuse to save the whole of ``model`` where ``folder``, from which it was loaded, has more.

    ``replaced`` are paths of modules that get other weights. ``rounded``: the user asked for the
    model's dtype. Raises ValueError as ``check_parts``, and for tensors that have no place in the
    model or a narrower one.
    """
    check_parts(model, folder, name)
    stored = {n: tensor.dtype for part in tensors_by_file(folder) for n, tensor in part.items()}
    found = places(model, stored, replaced)
    aside = [n for n, place in found.items() if place is None]
    if aside:
        raise InputError(f"{name} {_lost_tensors(aside)}")
    narrow = [n for n, own in found.items() if own is not None and is_narrower(own, stored[n])]
    if narrow and not rounded:
        raise InputError(
            f"{name} holds tensors in a wider dtype than the model's ({named(narrow)}), which "
            "would be rounded; pass --dtype float32 to keep their values, or another to round them"
        )


def note_losses(model: nn.Module) -> None:
    """Note on a model with new routers what a save would lose of the folder it was loaded from.

    It must still have the name of that folder.
    """
    inner = inner_model(model)
    lost = None if inner is None else getattr(inner, _LOST, None) or _losses(inner)
    for module in model.modules() if lost else ():
        if isinstance(module, PreTrainedModel):
            setattr(module, _LOST, lost)


def check_save(model: Any, *, save_original_format: bool = True, **others: Any) -> None:
    """Refuse a ``save_pretrained`` with these options that would lose what the model's folder has.

    Raises ValueError for what ``note_losses`` found, and for weights that were loaded packed.
    """
    lost = save_refusal(model, save_original_format=save_original_format)
    if lost:
        raise InputError(f"cannot save this {type(model).__name__}: {lost}")


def save_refusal(model: nn.Module, *, save_original_format: bool = True) -> str | None:
    """Say why ``check_save`` refuses a model, None if it does not."""
    inner = inner_model(model)
    lost: str | None = getattr(inner, _LOST, None)
    if lost == _ADAPTER_ALONE or getattr(inner, "_hf_peft_config_loaded", False):
        return lost if lost == _ADAPTER_ALONE else None  # nothing but adapters is written
    method = packed_method(inner, save_original_format=save_original_format)
    if lost or not method:
        return lost
    way = remedy(method, "FOLDER")
    if saved_in_memory(method):
        way = "pass save_original_format=False, which writes them as they are in memory"
    return f"its weights were loaded packed ({method}); {_KEEP}, or {way}"


def _losses(model: PreTrainedModel) -> str | None:
    if getattr(model, "_hf_peft_config_loaded", False):
        return _ADAPTER_ALONE
    folder = _source(model)
    if folder is None:
        return None
    lost, method = _lost_parts(model, folder), quantization_method(_config(folder))
    if not lost and _is_whole(model, _config(folder)):
        if method and not saved_in_memory(method):  # of those ``check_save`` asks the model
            lost = _lost_packed(method, folder)
        elif (folder / _ADAPTER).is_file() and not is_peft_available():  # it would be loaded
            lost = _beside()
        elif not method or packed_method(model):  # else the user has unpacked them
            lost = _left_aside(model, folder)
    return f"its folder {lost}" if lost else None


def _left_aside(model: PreTrainedModel, folder: Path) -> str | None:
    """Words on tensors of a folder that have no place in the model that was loaded from it."""
    try:
        stored = [name for part in tensors_by_file(folder) for name in part]
    except (OSError, SafetensorError, ValueError):  # changed since then
        return None
    aside = [name for name, place in places(model, stored).items() if place is None]
    return _lost_tensors(aside) if aside else None


def _lost_parts(model: nn.Module, folder: Path) -> str | None:
    """Words on configurations of parts, such as vision_config, that the model's own lacks."""
    inner = inner_model(model)
    own = {QUANTIZATION} if inner is None else {QUANTIZATION, *inner.config.to_dict()}
    parts = [n for n, v in _config(folder).items() if n.endswith("_config") and isinstance(v, dict)]
    lost = [name for name in parts if name not in own]
    if inner is None or not lost:
        return None
    return (
        f"is a wrapper, and {type(inner).__name__} is one part of it: {' and '.join(lost)} would "
        "be lost with what they describe; open the whole in Python (AutoModelForMultimodalLM, "
        "l2r.swap_routers, save_pretrained), or write a copy of the part "
        f"({type(inner).__name__}.from_pretrained, save_pretrained) and take that"
    )


def _lost_packed(method: str, name: str | Path) -> str:
    return (
        f"is quantized ({method}), and a save of the whole model would lose the packed weights; "
        f"{_KEEP}, or {remedy(method, name)}"
    )


def _lost_tensors(aside: Collection[str]) -> str:
    return (
        f"holds tensors that transformers leaves aside ({named(sorted(aside))}), and a save of "
        f"the whole model would lose them; {_KEEP}, or write a copy without them "
        "(AutoModelForCausalLM.from_pretrained, save_pretrained) and take that"
    )


def _beside() -> str:
    return (
        f"holds an adapter beside the weights ({_ADAPTER}), which a new folder would lose; merge "
        "the two into a copy (peft's merge_and_unload) and take that"
    )


def _source(model: PreTrainedModel) -> Path | None:
    """Return the folder that a model was loaded from, or a hub id's in the cache."""
    name = model.name_or_path
    if not name:
        return None
    source = Source(*model.__dict__.get(SOURCE, (name, name, {})))
    if source.name != name:  # renamed since
        source = Source(name, name, {})
    inside = source.hub.get("subfolder") or ""
    folder = Path(source.place) / inside
    if (folder / "config.json").is_file():
        return folder
    config = (Path(inside) / "config.json").as_posix()
    cache = source.hub.get("cache_dir")
    try:
        revision = getattr(model.config, "_commit_hash", None)
        file = try_to_load_from_cache(source.place, config, cache_dir=cache, revision=revision)
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def _is_whole(model: PreTrainedModel, config: Mapping[str, Any]) -> bool:
    """Say whether a model is the one of a config.json: the same class and number of layers."""
    names = config.get("architectures") or [type(model).__name__]
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    own = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    return type(model).__name__ in names and layers in (None, own)


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "config.json", strict=False)
