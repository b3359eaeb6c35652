"""Read a recipe: a packaged name or a YAML path, its base, then ``key.sub=value`` changes.

``demo/_base.yaml`` holds two YAML documents. The first are settings, a base like any other
(``base: demo/_base``). The second has under ``recipes`` what each recipe of the folder changes,
put over the settings and the router of its name in ``_routers.yaml``, or over its own ``base``
alone. A file ``small/_cpu.yaml`` makes recipes ``small/cpu-...``.

Besides the changes there is a header: ``about``, ``command``, ``hardware`` and ``expected``, given
for the whole table or for one recipe, with {name}, {title} and {number} filled in.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import ValidationError

from l2r.errors import InputError
from l2r.files.reading import read_change, read_yaml
from l2r.files.wording import known_as, nearest
from l2r.images import BUILT_IN_IMAGES
from l2r_lab.training.recipes.schema import PIXELS, SECTIONS_ONLY, LanguageRecipe
from l2r_lab.training.recipes.vision_schema import VisionRecipe

AnyRecipe = LanguageRecipe | VisionRecipe
_KINDS: dict[Any, type[AnyRecipe]] = {"language": LanguageRecipe, "vision": VisionRecipe}
_MAX_BASES = 5


def recipe_names() -> list[str]:
    """Return packaged recipes, e.g. ``demo/l2r-sips``."""
    return list(packaged_recipes())


def recipes_in(folder: str) -> list[str]:
    """Return packaged recipes directly inside ``folder``. Raises ValueError when there are none."""
    folders = {name.rpartition("/")[0] for name in recipe_names()}
    folder = known_as(folder, folders)
    names = [name for name in recipe_names() if name.rpartition("/")[0] == folder]
    if not names:
        hint = nearest(folder, folders)
        raise InputError(
            f"unknown recipe folder {folder!r}{hint}; known: {', '.join(sorted(folders))}"
        )
    return names


def recipe_header(name: str) -> str:
    """Describe a packaged recipe in lines: its command, its hardware and what to expect.

    Raises ValueError for an unknown recipe.
    """
    name = known_as(name, packaged_recipes())
    if name not in packaged_recipes():
        raise _unknown(name)
    return packaged_recipes()[name].header


def load_recipe(name: str, changes: Sequence[str] = ()) -> AnyRecipe:
    """Recipe from a packaged name or a path, with ``key.sub=value`` changes applied in order.

    Another ``router.kind`` keeps the options off their defaults that it reads as well; other
    ``data.images`` than built-in ones are read as they are; of steps, tokens and epochs the one
    given last holds.

    Raises ValueError, in one line, for an unknown recipe, a broken file, an unknown field (with
    the nearest known name), a value out of its limits or a setting that nothing reads.
    """
    values, given = _changed(name, changes)
    _sections(values, given, name)
    recipe = parse_recipe(values, source=name)
    _check_read(recipe, given, name)
    return recipe


def load_sections(name: str, changes: Sequence[str] = ()) -> AnyRecipe:
    """Every section of ``load_recipe`` but the router, whose options are read with torch.

    ``router`` is what the recipe gives for it. Raises ValueError as ``load_recipe`` does.
    """
    return _sections(*_changed(name, changes), name)


def parse_recipe(values: Mapping[str, Any], *, source: str) -> AnyRecipe:
    """Check plain values against the schema; ``source`` names them in errors."""
    return _validated(values, source)


def recipe_values(name: str, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Plain values of a recipe with its changes, not checked. Raises ValueError where it is none.

    ``check_sections`` checks them.
    """
    return _changed(name, changes)[0]


def check_sections(values: Mapping[str, Any], *, source: str) -> None:
    """Raise ValueError, as ``parse_recipe`` does, for every section but the router: no torch."""
    _validated({"router": {}, **values}, source, SECTIONS_ONLY)


def _changed(name: str, changes: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of a recipe with its changes, and those among them that no base gave."""
    values, given = _read(name), dict(_values(name))
    given.pop("base", None)
    # Router and images first: what is given for them holds for the new ones, wherever it stands.
    first = ("router.kind=", "router.preset=", "data.images=")
    for change in sorted(changes, key=lambda change: not change.startswith(first)):
        field, value = read_change(change)
        values, given = set_field(values, field, value), set_field(given, field, value)
    return values, given


def _sections(values: Mapping[str, Any], given: Mapping[str, Any], source: str) -> AnyRecipe:
    sections = _validated({"router": {}, **values}, source, SECTIONS_ONLY)
    _check_read(sections, {name: v for name, v in given.items() if name != "router"}, source)
    return sections


def _check_read(recipe: AnyRecipe, given: Mapping[str, Any], source: str) -> None:
    try:
        recipe.check_read(given)  # alone: what a base says may be for other recipes
    except InputError as error:
        raise InputError(f"recipe {source}: {error}") from error


def _validated(
    values: Mapping[str, Any], source: str, context: Mapping[str, bool] | None = None
) -> AnyRecipe:
    task = values.get("task")
    if not isinstance(task, str) or task not in _KINDS:
        raise InputError(f"recipe {source}: task must be {' or '.join(_KINDS)}; got {task!r}")
    kind = _KINDS[task]
    try:
        return kind.model_validate(values, context=context)
    except ValidationError as error:
        raise InputError(f"recipe {source}: {first_problem(error, kind)}") from error


def dump_recipe(recipe: AnyRecipe) -> str:
    """Return the whole recipe as YAML, every field written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _read(name: str, depth: int = 0) -> dict[str, Any]:
    """Values of a packaged recipe or a file over those of the recipe its ``base`` names."""
    values = dict(_values(name))
    base = values.pop("base", None)
    if base is None:
        return values
    if depth >= _MAX_BASES:
        raise InputError(f"recipe {name} has more than {_MAX_BASES} bases; is one its own base?")
    return merge(_read(str(base), depth + 1), values)


def _values(name: str) -> dict[str, Any]:
    if name.endswith((".yaml", ".yml")):  # without the packaged ones, which take half a second
        return _file_values(Path(name))
    name = known_as(name, packaged_recipes())
    if name in packaged_recipes():
        return packaged_recipes()[name].values
    values = settings(name)
    if values is None:
        raise _unknown(name)
    return values


def _file_values(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"recipe file {path} does not exist")
    return read_yaml(path)


def _unknown(name: str) -> InputError:
    inside = [recipe for recipe in recipe_names() if recipe.startswith(f"{name}/")]
    if inside:
        return InputError(f"{name!r} is a folder of recipes; choose one: {', '.join(inside)}")
    hint = nearest(name, recipe_names())
    return InputError(f"unknown recipe {name!r}{hint}; l2r train --list shows all")


def full_name(field: str, kind: Any) -> str:
    """Hint at the section of a field: `` (did you mean 'training.steps'?)``, or nothing."""
    if "." in field or not hasattr(kind, "model_fields"):
        return ""
    places = []
    for section, hint in get_type_hints(kind).items():
        if hasattr(hint, "model_fields") and field in hint.model_fields:
            places.append(f"{section}.{field}")
    return f" (did you mean {' or '.join(map(repr, places))}?)" if places else ""


def first_problem(error: ValidationError, kind: Any) -> str:
    """Say the first problem of a pydantic error in one line, with the nearest name if one is wrong.

    ``kind`` is the class that was read: a section, or a dataclass.
    """
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"]]
    where = ".".join(place)
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        section = kind
        for part in place[:-1]:
            parts = get_args(section)  # of list[X] or dict[str, X], whose X it is
            section = parts[-1] if parts else get_type_hints(section)[part]
        hint = full_name(where, kind) or nearest(place[-1], get_type_hints(section))
        if not hint and "router" in getattr(section, "model_fields", ()):
            hint = f" (an option of the router is 'router.{where}')"
        return f"unknown field {where}{hint}"
    message = problem["msg"].removeprefix("Value error, ")
    value = "" if problem["type"] in ("missing", "value_error") else f"; got {problem['input']!r}"
    return f"{where}: {message}{value}" if where else f"{message}{value}"


_HEADER = {"about": "", "command": "Command: ", "hardware": "Hardware: ", "expected": "Expected: "}
_FILLED_IN = ("title", "number")  # number: the metric that the paper has, or that was seen


@dataclass(frozen=True)
class Packaged:
    """values: changes, and in ``base`` the recipe or settings under them. header: for readers.

    router: its name in ``_routers.yaml``, such as ``l2r_sips``; None for an ablation of one.
    """

    values: dict[str, Any]
    header: str
    router: str | None


def settings(name: str) -> dict[str, Any] | None:
    """Read the file of a name such as ``demo/_base``; None if there is no such file.

    A name never leaves the package.
    """
    folder, _, stem = name.rpartition("/")
    paths = [path for path in _files() if (path.parent.name, path.stem) == (folder, stem)]
    return _documents(paths[0])[0] if paths else None


@cache
def packaged_recipes() -> dict[str, Packaged]:
    """Every recipe by name, e.g. ``demo/l2r-sips``."""
    routers = _documents(_root() / "_routers.yaml")[0]
    recipes = {}
    for path in _files():
        folder, part = path.parent.name, path.stem.removeprefix("_")
        prefix = f"{folder}/" if part == "base" else f"{folder}/{part}-"
        for table in _documents(path)[1:]:
            entries = table.pop("recipes")
            for key, changes in entries.items():
                entry, name = changes or {}, prefix + key
                shared = {} if "base" in entry else routers.get(key, {})
                router = key.replace("-", "_") if key in routers else None
                base = f"{folder}/{path.stem}"
                recipes[name] = _recipe(name, base, [table, shared, entry], router)
    return dict(sorted(recipes.items(), key=lambda item: item[0].split("/")))


def _recipe(name: str, base: str, parts: list[Mapping[str, Any]], router: str | None) -> Packaged:
    """Later parts over earlier ones; the keys of the header apart from the recipe's fields."""
    header: dict[str, Any] = {"name": name}
    values: dict[str, Any] = {"base": base}
    for part in parts:
        header |= {key: part[key] for key in part if key in (*_HEADER, *_FILLED_IN)}
        values = merge(values, {key: part[key] for key in part if key not in header})
    lines = [word + header[key].format(**header).strip() for key, word in _HEADER.items()]
    return Packaged(values, "\n".join(lines), router)


def _root() -> Path:
    return Path(str(files("l2r_lab.training.recipes")))


def _files() -> list[Path]:
    return sorted(_root().glob("*/_*.yaml"))


def _documents(path: Path) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a tenth of the time, where it is built
    return list(yaml.load_all(path.read_text(encoding="utf-8"), Loader=loader))


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
    from l2r.routers.defaults import KIND

    if "preset" in below and above["kind"] != KIND:
        below = {"kind": KIND, **below}
        del below["preset"]
    return _for_kind(below, above["kind"]) if "kind" in below else below


def _with_losses(above: Mapping[str, Any]) -> Mapping[str, Any]:
    """Set the z-loss to 0 under a preset, which was found without one, unless it is given."""
    router, losses = above.get("router"), above.get("losses") or {}
    if not isinstance(router, dict) or "preset" not in router or not isinstance(losses, dict):
        return above
    return {**above, "losses": {"z": 0.0, **losses}}


def _for_kind(router: dict[str, Any], kind: str) -> dict[str, Any]:
    """Fit a router section to another kind: options off their defaults that it reads as well.

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
