"""Values put over a recipe's: by a recipe on its base, on the command line, by a sweep."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from l2r.errors import InputError
from l2r.runs.reading import parse_yaml

# What a recipe says of its images, by section; it says nothing of others.
PIXELS = {
    "model": ("image_size", "patch_size", "num_channels"),
    "data": ("mean", "deviation"),
}
BUILT_IN_IMAGES = ("digits", "fashion-mnist")  # other names are places, which may move
_SHOWN = 200  # characters of a value in an error
LENGTH_FIELDS = ("training.steps", "training.tokens", "training.epochs")


def merge(below: Mapping[str, Any], above: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Values of ``above`` over those of ``below``, section by section; neither is changed.

    Another router keeps the options off their defaults that it reads as well; a length of training
    replaces one in another unit; of other images than built-in ones, sizes and statistics are
    open until they are read. A preset replaces the router section below it and sets ``losses.z`` to
    0 where ``above`` does not give it. ``place`` is the section that both are, e.g. ``training``.
    """
    merged = dict(below) if place else _for_images(below, above)
    if place == "router":
        merged = _for_router(merged, above)
    if not place:
        above = _with_losses(above)
    fields = {f"{place}.{name}" for name, value in above.items() if value is not None}
    if fields & set(LENGTH_FIELDS):
        merged = {key: v for key, v in merged.items() if f"{place}.{key}" not in LENGTH_FIELDS}
    for key, value in above.items():
        old = merged.get(key)
        sections = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = merge(old or {}, value, f"{place}.{key}".lstrip(".")) if sections else value
    return merged


def set_field(values: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    """``values`` with one field set, e.g. ``training.steps``, as ``merge`` does it.

    Raises ValueError where a part of the name is not a section.
    """
    section: Any = values
    *parents, last = field.split(".")
    for parent in parents:
        section = section.get(parent, {})
        if not isinstance(section, dict):
            raise InputError(f"{field} is not a field: {parent} holds a value, not fields")
    nested = {last: value}
    for parent in reversed(parents):
        nested = {parent: nested}
    return merge(values, nested)


def read_change(change: str) -> tuple[str, Any]:
    """Field and value of ``key.sub=value``. Raises ValueError unless it is that, in YAML."""
    field, separator, text = change.partition("=")
    if not separator or not field:
        raise InputError(f"changes must look like key.sub=value; got {change!r}")
    try:
        return field, parse_yaml(text)
    except InputError as error:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        raise InputError(f"{field} has a value that is not valid YAML: {shown!r}") from error


def _for_images(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``below`` without what it says of its built-in images, where ``above`` names others."""
    sections = (values.get("data") for values in (below, above))
    old, new = (data.get("images") if isinstance(data, Mapping) else None for data in sections)
    if old not in BUILT_IN_IMAGES or new in (None, old):
        return dict(below)
    return {
        name: {field: v for field, v in value.items() if field not in PIXELS.get(name, ())}
        if isinstance(value, dict)
        else value
        for name, value in below.items()
    }


def _for_router(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a router section that stay under another router."""
    if "preset" in above:
        return {}  # it gives every option
    if "kind" not in above:
        return below
    from l2r.routers.preset import KIND  # a router's options stand in its file: torch is needed

    if "preset" in below and above["kind"] != KIND:
        below = {"kind": KIND, **below}
        del below["preset"]
    return _for_kind(below, above["kind"]) if "kind" in below else below


def _with_losses(above: Mapping[str, Any]) -> Mapping[str, Any]:
    """A preset of the router was found without a z-loss and goes without, unless told otherwise."""
    router, losses = above.get("router"), above.get("losses") or {}
    if not isinstance(router, dict) or "preset" not in router or not isinstance(losses, dict):
        return above
    return {**above, "losses": {"z": 0.0, **losses}}


def _for_kind(router: dict[str, Any], kind: str) -> dict[str, Any]:
    """A router section for another kind: the options off their defaults that it reads as well.

    Defaults differ between kinds; a section written out in full means what a short one does.
    """
    if router["kind"] == kind:
        return router
    from l2r.routers.config import make_config, options_of

    defaults = dataclasses.asdict(make_config(router["kind"]))
    read = {"kind", *options_of(kind)}
    return {
        name: value
        for name, value in router.items()
        if name not in defaults or (name in read and value != defaults[name])
    }
