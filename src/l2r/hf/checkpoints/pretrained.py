"""Open and save checkpoints: stock ones, our own model types, and models with swapped routers."""

import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from l2r.errors import InputError, blames_input
from l2r.files.atomic import copy_file, new_folder, write_json
from l2r.hf.checkpoints.folders import (
    averaged_folder,
    check_is_language_model,
    checkpoint_folder,
    classifies_images,
    has_tokenizer,
    kept_files,
    local_checkpoint,
    tokenizer_settings,
)
from l2r.hf.checkpoints.foreign_tokenizer import open_tokenizer
from l2r.hf.checkpoints.placement import Placement
from l2r.hf.models import olmoe
from l2r.hf.models.card import write_card
from l2r.hf.models.layouts import packing
from l2r.hf.models.opening import NeedsPackageAndCode, preparing_code
from l2r.hf.models.weight_files import check_finite, on_meta, read_config, read_weights
from l2r.hf.swap import class_registry
from l2r.hf.swap.sites import Site, find_sites, recognition_note
from l2r.hf.swap.swapped_classes import mark_config, swapped_model
from l2r.routers.observe import more_inputs

_SIZES = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "num_experts", "num_experts_per_tok", "rms_norm_eps",
)  # fmt: skip
_OF_LOADING = ("dtype",)  # fields of a configuration that from_pretrained takes itself
_READS_TEXT = (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForTokenClassification,
)
_SHARD = "500MB"  # of a checkpoint that is larger than memory
FLOAT32 = Placement("float32")


def load_pretrained(
    path: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Load a language model or an image classifier in Hugging Face format, in evaluation mode.

    ``path`` is a folder, a run folder of ours (its ``model/``) or a hub id, of which ``revision``
    names a branch, a tag or a commit. Where config.json carries ``l2r_swap`` the routers are
    swapped before the weights are read. Every tensor must be there, have its place in the model
    and be finite. A wrapper is opened whole, but for omni models, whose thinker is the one part
    that reads.
    ``options`` go to ``from_pretrained`` (``dtype``, ``device_map``, fields of the configuration,
    ...); what a ``device_map`` leaves on disk lies in a temporary folder that is gone with the
    model, unless ``offload_folder`` names one.
    ``trust_remote_code`` runs the code that the folder brings for a type of model that neither
    transformers nor this package has.
    Raises ValueError when the folder holds no readable checkpoint or one that does not fit.
    """
    path = local_checkpoint(path, revision=revision, code=trust_remote_code)
    folder = checkpoint_folder(path)
    kind = "a language model"
    offloaded = None
    if options.get("device_map") is not None and "offload_folder" not in options:
        offloaded = tempfile.TemporaryDirectory(prefix="l2r-offload-")
        options["offload_folder"] = offloaded.name
    try:
        config = read_config(folder, trust_remote_code=trust_remote_code)
        kind = "an image classifier" if classifies_images(config.architectures) else kind
        swaps = getattr(config, "l2r_swap", None)
        if swaps and "config" in options:
            raise InputError(
                "config of a swapped model is that of its folder; pass fields of it by their names"
            )
        if swaps:
            for name in [n for n in options if n in config.to_dict() and n not in _OF_LOADING]:
                setattr(config, name, options.pop(name))
            model = read_weights(_swapped_class(config, folder), folder, config=config, **options)
        else:
            options["trust_remote_code"] = trust_remote_code
            if _reading_part(config) is not config:
                config = options["config"] = _reading_part(config)
            model = read_weights(_auto_class(config), folder, **options)
        _check_choices(model)
        if offloaded is not None:
            weakref.finalize(model, offloaded.cleanup)
        return model
    except Exception as error:  # transformers lets any error of a damaged folder through
        raise cannot_load(kind, folder, error) from error


def meta_model(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Build the model that ``load_pretrained`` opens, from config.json only, on the meta device."""
    folder = checkpoint_folder(path)
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if getattr(config, "l2r_swap", None):
        return on_meta(_swapped_class(config, folder), config)
    config = _reading_part(config)
    return on_meta(_auto_class(config), config, trust_remote_code=trust_remote_code)


def model_like(config: olmoe.L2rOlmoeConfig, path: str | Path) -> Any:
    """Return the model in ``path``, in fp32 and training mode, if it is what ``config`` describes.

    Raises ValueError naming the first field that differs, or when nothing can be loaded.
    """
    model = load_pretrained(path, dtype=torch.float32).train()
    expected, actual = _fields(config), _fields(model.config)
    for name, value in expected.items():
        if actual.get(name) != value:
            raise InputError(
                f"init_from must hold a model like the recipe's: {name} is {actual.get(name)} in "
                f"{path}, {value} in the recipe"
            )
    return model


def _fields(config: Any) -> dict[str, Any]:
    """Sizes and the fields of the router, by the names that a recipe gives them."""
    values = config.to_dict()
    router = values.get("router") or {}
    sizes = {name: values.get(name) for name in _SIZES}
    sizes["rope_theta"] = (values.get("rope_parameters") or {}).get("rope_theta")
    return {**sizes, **{f"router.{name}": value for name, value in router.items()}}


def save_model(
    model: Any,
    out: Path,
    *,
    tokenizer: Any = None,
    files: Mapping[str, str] | None = None,
    sections: Sequence[str] = (),
    write: Callable[[Any, Path], None] | None = None,
    source: Path | None = None,
) -> None:
    """Write a model, its tokenizer and its card into a new folder: whole or not at all.

    ``files`` are further text files of the folder, by name; ``sections`` go into the card.
    ``write(model, folder)`` writes the model in place of ``save_pretrained``. ``source`` is the
    folder that the model came from: files of its processors and its license are copied, and those
    of its tokenizer, unless it needs code. ``files`` with code name its class, for others.
    Raises ValueError when ``out`` holds something already or a weight is not finite.
    """
    with new_folder(out) as part:
        (write or _write_weights)(model, part)
        copied = source is not None and not tokenizer_settings(source).get("auto_map")
        if tokenizer is not None and not copied:
            tokenizer.save_pretrained(part)
        for name, text in (files or {}).items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_text(text, encoding="utf-8")
        if source is not None:
            _copy_others(source, part, code=_keeps_code(model.config))
            if tokenizer is not None and copied and files:
                _name_tokenizer(part, tokenizer)
        write_card(part, model, sections)


def _keeps_code(config: Any) -> bool:
    """Say whether a configuration names code in its folder that a copy of the model needs."""
    places = preparing_code(getattr(config, "auto_map", None)).values()
    return isinstance(config, NeedsPackageAndCode) or any("--" not in str(p) for p in places)


def _copy_others(source: Path, folder: Path, *, code: bool) -> None:
    """Copy what a copy of a model keeps, but files that are there already."""
    for file in kept_files(source, code=code):
        place = folder / file.relative_to(checkpoint_folder(source))
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            copy_file(file, place)


def _name_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Name the class of a tokenizer, which plain transformers would know by the model type."""
    settings = tokenizer_settings(folder)
    if not settings.get("tokenizer_class"):
        name = type(tokenizer).__name__
        write_json(folder / "tokenizer_config.json", {**settings, "tokenizer_class": name})


def _write_weights(model: Any, folder: Path) -> None:
    """Save in one file from memory, in shards from disk, so that few tensors are read at a time."""
    here = ((n, t) for n, t in model.state_dict().items() if not t.is_meta)  # others are on disk
    check_finite(here)
    if "disk" not in (getattr(model, "hf_device_map", None) or {}).values():
        model.save_pretrained(folder)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
        model.save_pretrained(folder, max_shard_size=_SHARD)


def cannot_load(what: str, folder: Path, error: Exception) -> Exception:
    """Return the InputError of a folder that cannot be loaded; transformers' own words say why.

    What a line of this package raised, and is no InputError, is a bug: the error as it is.
    """
    if not blames_input(error):
        return error
    if "trust_remote_code" in str(error):
        return InputError(
            f"cannot load {what} from {folder}: it needs code that the folder brings; read that "
            "code, and if you trust it pass --trust-remote-code (trust_remote_code=True)"
        )
    return InputError(f"cannot load {what} from {folder}: {error or type(error).__name__}")


def _reading_part(config: Any) -> Any:
    """Return the configuration of the part that reads: the thinker of an omni model."""
    return getattr(config, "thinker_config", config)


def _auto_class(config: Any) -> Any:
    """Return the Auto class for a configuration: that of the class which wrote the folder.

    So a wrapper opens whole, although some open as their language model alone too. Raises
    ValueError for another kind of model, which transformers answers with all that it has.
    """
    if classifies_images(config.architectures):
        return AutoModelForImageClassification
    known = [kind for kind in _READS_TEXT if type(config) in kind._model_mapping]
    names = config.architectures if isinstance(config.architectures, list) else []
    wrote = [k for k in known if k._model_mapping[type(config)].__name__ in names]
    if known:
        return (wrote or known)[0]
    if getattr(config, "auto_map", None):
        return AutoModelForCausalLM
    raise InputError(
        f"neither a causal language model nor an image classifier: model_type "
        f"{config.model_type!r}, architectures {config.architectures}"
    )


def _check_choices(model: Any) -> None:
    """Refuse a router that would choose more experts than there are, or none, and one that fails.

    Some families multiply by the matrix of a gate themselves, which fails where it is packed.
    """
    for site in find_sites(model):
        chosen, experts = site.sizes["top_k"], site.sizes["num_experts"]
        if not 1 <= chosen <= experts:
            raise InputError(
                f"experts per token must lie between 1 and the {experts} of {site.path}; "
                f"got {chosen}"
            )
        kind = next(filter(None, map(packing, site.router.parameters())), "")
        if kind and not _runs(site, model.dtype):
            raise InputError(
                f"the router {site.path} is packed ({kind}), and transformers' "
                f"{type(site.router).__name__} cannot compute with it; quantize again without the "
                "routers (llm_int8_skip_modules, modules_to_not_convert)"
            )


def _runs(site: Site, dtype: torch.dtype) -> bool:
    """Say whether a router of a model on a CPU takes a token; True where its block passes more."""
    device = next(site.router.parameters()).device
    if device.type != "cpu" or more_inputs(site.router):
        return True
    try:
        with torch.no_grad():
            site.router(torch.zeros(1, 1, site.sizes["hidden_size"], dtype=dtype))
    except RuntimeError:
        return False
    return True


def _swapped_class(config: Any, folder: Path) -> Any:
    """Return the class of a model whose routers were swapped; its configuration gets its class too.

    Folders of 0.2 have the names of the model before the swap; those with code name it.
    """
    if isinstance(config, NeedsPackageAndCode):
        code = get_class_from_dynamic_module(config.auto_map["AutoModelForCausalLM"], folder)
        return swapped_model(code)
    names = config.architectures if isinstance(config.architectures, list) else []
    architecture = class_registry.swapped_architecture(str(names[0]) if names else "")
    mark_config(config)
    return architecture


def load_causal_lm(
    path: str | Path,
    *,
    placement: Placement = FLOAT32,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Model in evaluation mode and its tokenizer, or None where the folder has none.

    ``path`` is a folder in Hugging Face format, a run folder of ours (its ``model/``) or a hub
    id; ``revision`` and ``trust_remote_code`` as for ``load_pretrained``.
    Raises ValueError when the folder holds no readable checkpoint.
    """
    folder = checkpoint_folder(local_checkpoint(path, revision=revision, code=trust_remote_code))
    check_is_language_model(folder, path)
    return load_model(folder, placement=placement, trust_remote_code=trust_remote_code)


def load_model(
    folder: Path, *, placement: Placement, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Load a language model or an image classifier, and its tokenizer or None, from a folder.

    ``placement.report`` takes a line on routers that are in no table.
    """
    options = placement.options(checkpoint_folder(folder))
    model = load_pretrained(folder, trust_remote_code=trust_remote_code, **options)
    if note := recognition_note(model):
        placement.report(note)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    return placement.place(model).eval(), tokenizer


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Read the configuration of a checkpoint.

    Raises ValueError where it is damaged, or needs code that is not trusted.
    """
    folder = checkpoint_folder(path)
    try:
        return read_config(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # of any kind, as for the model
        raise cannot_load("a configuration", folder, error) from error


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a folder or run folder, None where it has none.

    Raises ValueError for one that cannot be read or needs code of the folder that is not trusted.
    """
    if not has_tokenizer(path):
        return None
    return _tokenizer(checkpoint_folder(path), trust_remote_code=trust_remote_code)


def load_image_classifier(
    path: str | Path,
    *,
    averaged: bool = False,
    placement: Placement = FLOAT32,
    trust_remote_code: bool = False,
) -> Any:
    """Model in evaluation mode from a Hugging Face folder or a run folder of ours.

    ``averaged`` takes the moving average of the weights (``model-ema/`` of a run). Raises
    ValueError when the folder holds no readable image classifier.
    """
    folder = averaged_folder(path) if averaged else checkpoint_folder(path)
    try:
        model = read_weights(
            AutoModelForImageClassification,
            folder,
            trust_remote_code=trust_remote_code,
            **placement.options(folder),
        )
    except Exception as error:  # transformers lets any error of a damaged folder through
        raise cannot_load("an image classifier", folder, error) from error
    return placement.place(model).eval()


def hugging_face_tokenizer(path: Path) -> Any:
    """Return the Hugging Face tokenizer of a folder, or of a ``tokenizer.json`` by itself.

    Raises ValueError for one that cannot be read or needs code of its folder.
    """
    folder = path if path.is_dir() else path.parent
    if (folder / "tokenizer_config.json").is_file():
        return _tokenizer(folder, trust_remote_code=False)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return open_tokenizer(lambda: PreTrainedTokenizerFast(tokenizer_file=str(file)))
    except Exception as error:  # tokenizers raises bare Exception for an unreadable file
        raise cannot_load("a tokenizer", file, error) from error


def _tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    try:
        trusted = {"trust_remote_code": trust_remote_code}
        return open_tokenizer(lambda: AutoTokenizer.from_pretrained(folder, **trusted))
    except Exception as error:  # of any kind, as for a model
        raise cannot_load("a tokenizer", folder, error) from error
