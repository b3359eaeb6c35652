"""Make other loaders fail with an install hint, by notes in config.json.

transformers builds a family's own class from any folder of weights, and draws what is missing.
A configuration_l2r.py in the folder does less (tried with transformers 5.24): without
``trust_remote_code`` the error names no package, and ``MixtralForCausalLM.from_pretrained`` opens
the folder with routers drawn at random.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from l2r.errors import InputError

_PACKAGE = (
    "The routers of this checkpoint need the Python package l2r-moe (pip install 'l2r-moe[lm]', "
    "then import l2r)"
)
_NO_CODE = f"{_PACKAGE}; trust_remote_code does not open it, though transformers names it next."
# transformers prints the first where it does not know the model type, before any code is loaded;
# a repository of this name cannot be. The second stands in a field whose type the configuration
# class checks, printing the value: the first of these that it has.
_AUTO_MAP = {"AutoConfig": f"{_NO_CODE}--l2r.Config"}
_FIELDS = ("initializer_range", "tie_word_embeddings", "image_token_id")
_SAVED = "l2r_"  # before the name of the field, for its value
CODE = f"{_SAVED}auto_map"  # the folder's own code, which builds the model without its routers
_NOTE = f"{_PACKAGE}; open it with an Auto class of transformers or l2r.load_pretrained"


class NeedsPackage:
    """Mixin of configurations whose models need this package: it writes and removes the notes.

    A configuration whose ``auto_map`` names a model's code brings that code, and gets none.
    """

    auto_map: Mapping[str, str] = {}  # TRL asks for it where transformers exports no such class

    def to_json_file(self, json_file_path: str | Path, use_diff: bool = True) -> None:
        """Write config.json as transformers does, and the notes."""
        super().to_json_file(json_file_path, use_diff=use_diff)  # type: ignore[misc]
        path = Path(json_file_path)
        values = self.with_notes(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def with_notes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the notes to the values of this configuration for config.json."""
        if names_model_code(self.auto_map):
            return dict(values)
        noted = {**values, "auto_map": {**preparing_code(values.get("auto_map")), **_AUTO_MAP}}
        checked = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        for field in [name for name in _FIELDS if name in checked][:1]:
            noted |= {field: _NOTE, _SAVED + field: values.get(field, getattr(self, field))}
        return noted

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> Any:
        """Read config.json as transformers does, without the notes."""
        return super().from_dict(without_notes(config_dict), **options)  # type: ignore[misc]

    @classmethod
    def _dict_from_json_file(cls, json_file: str | Path) -> dict[str, Any]:
        """Read a file for ``from_json_file``, which does not call ``from_dict``."""
        return without_notes(super()._dict_from_json_file(json_file))  # type: ignore[misc]


class NeedsPackageAndCode(NeedsPackage):
    """Mixin of configurations whose models need this package and the code in their folder."""

    def with_notes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the notes, the first in the place of the code's names."""
        if not names_model_code(values.get("auto_map")):
            return super().with_notes(values)
        noted = {**preparing_code(values["auto_map"]), **_AUTO_MAP}
        return {**values, CODE: values["auto_map"], "auto_map": noted}


def without_notes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json without notes of ours; the code's names in their place."""
    plain = dict(values)
    for field in _FIELDS:
        if plain.get(field) == _NOTE:
            plain[field] = plain.pop(_SAVED + field)
    names = plain.get("auto_map")
    if isinstance(names, dict) and str(names.get("AutoConfig")).startswith(_PACKAGE):
        del plain["auto_map"]
        plain |= {"auto_map": kept} if (kept := preparing_code(names)) else {}
    if CODE in plain:
        plain["auto_map"] = plain.pop(CODE)
    return plain


def names_model_code(auto_map: Any) -> bool:
    """Say whether an ``auto_map`` has the code of a configuration or a model."""
    return isinstance(auto_map, Mapping) and len(preparing_code(auto_map)) < len(auto_map)


def preparing_code(auto_map: Any) -> dict[str, Any]:
    """Select the entries of an ``auto_map`` that name code of tokenizers and processors."""
    names = auto_map if isinstance(auto_map, Mapping) else {}
    return {n: place for n, place in names.items() if not n.startswith(("AutoConfig", "AutoModel"))}


def drop_model_code(config: Any) -> None:
    """Remove a model's code, which knows nothing of a swap, from a configuration's ``auto_map``."""
    kept = preparing_code(config.__dict__.pop("auto_map", None))
    if kept:
        config.auto_map = kept


@cache
def config_with_code(base: Any) -> Any:
    """Make the configuration class, from a folder's code, of models with replaced routers."""
    if issubclass(base, NeedsPackageAndCode):
        return base
    body = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (NeedsPackageAndCode, base), body)


SOURCE = "_l2r_source"  # attribute of a model that was opened
_OF_THE_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def check_given_config(path: Any, config: Any, options: Mapping[str, Any]) -> None:
    """Compare a configuration object that is given for a folder or hub id with the one there.

    ``options`` are those of ``from_pretrained``. Raises ValueError where the folder is of a model
    type of ours and the object of another, or of routers of another kind or in other layers: they
    would be drawn, or have the weights of others.
    """
    if not isinstance(config, PreTrainedConfig) or config.name_or_path == str(path):
        return  # read there
    hub = {name: options[name] for name in _OF_THE_HUB if name in options}
    try:
        there, _ = PreTrainedConfig.get_config_dict(path, **hub)
    except (OSError, ValueError):
        return  # no config.json, of which loading goes on without
    names = ("model_type", "router", "l2r_swap")
    given = {name: getattr(config, name, None) for name in names}
    ours = str(there.get("model_type", "")).startswith("l2r_") or there.get("l2r_swap")
    if ours and _routers(there) != _routers(given):
        raise InputError(
            f"{path} holds a model of type {there.get('model_type')} with routers of l2r, which "
            f"the given config, of type {config.model_type}, does not build: they would be drawn "
            f"at random; leave config out, or take AutoConfig.from_pretrained({str(path)!r})"
        )


class Source(NamedTuple):
    """Place where a model was opened: a folder's whole path or a hub id, and options of the hub."""

    name: str
    place: str
    hub: dict[str, Any]


def source_of(path: Any, options: Mapping[str, Any]) -> Source:
    """Note what ``from_pretrained`` is given, before the working directory changes."""
    place = str(Path(path).absolute() if Path(path).is_dir() else path)
    return Source(str(path), place, {n: options[n] for n in _OF_THE_HUB if n in options})


def note_source(opened: Any, source: Source) -> None:
    """Keep a source on the model, or the first of the tuple, that ``from_pretrained`` returned.

    As a plain tuple, so that a pickled model needs none of this package.
    """
    model = opened[0] if isinstance(opened, tuple) else opened
    model.__dict__[SOURCE] = tuple(source)


def _routers(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Model type, kind of an own model's routers and, of each swap, layers, selection and kind."""
    swaps = values.get("l2r_swap") or ()
    return (
        values.get("model_type"),
        _kind(values),
        [(swap.get("layers"), swap.get("selection"), _kind(swap)) for swap in swaps],
    )


def _kind(values: Mapping[str, Any]) -> Any:
    """Return the kind of a ``router`` section."""
    router = values.get("router")
    return router.get("kind") if isinstance(router, Mapping) else None
