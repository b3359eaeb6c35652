"""Read a recipe: a packaged name or a YAML path, its base, then ``key.sub=value`` changes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import ValidationError

from l2r.errors import InputError
from l2r.runs.reading import read_yaml
from l2r.runs.spelling import known_as, nearest
from l2r.training.recipes.changes import merge, read_change, set_field
from l2r.training.recipes.packaged import packaged_recipes, settings
from l2r.training.recipes.router_section import SECTIONS_ONLY
from l2r.training.recipes.schema import LanguageRecipe
from l2r.training.recipes.vision_schema import VisionRecipe

AnyRecipe = LanguageRecipe | VisionRecipe
_KINDS: dict[Any, type[AnyRecipe]] = {"language": LanguageRecipe, "vision": VisionRecipe}
_MAX_BASES = 5


def recipe_names() -> list[str]:
    """Packaged recipes, e.g. ``demo/l2r-sips``."""
    return list(packaged_recipes())


def recipes_in(folder: str) -> list[str]:
    """Packaged recipes directly inside ``folder``. Raises ValueError when there are none."""
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
    """What a packaged recipe is, its command, its hardware and what to expect, in lines.

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
    """The whole recipe as YAML, every field written out."""
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
    name = known_as(name, packaged_recipes())
    if name.endswith((".yaml", ".yml")):
        return _file_values(Path(name))
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
    """A hint for a field without its section: `` (did you mean 'training.steps'?)``, or nothing."""
    if "." in field or not hasattr(kind, "model_fields"):
        return ""
    places = []
    for section, hint in get_type_hints(kind).items():
        if hasattr(hint, "model_fields") and field in hint.model_fields:
            places.append(f"{section}.{field}")
    return f" (did you mean {' or '.join(map(repr, places))}?)" if places else ""


def first_problem(error: ValidationError, kind: Any) -> str:
    """The first problem of a pydantic error in one line, with the nearest name if one is wrong.

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
