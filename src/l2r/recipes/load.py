"""Read a recipe: a packaged name or a YAML path, its base, then ``key.sub=value`` changes."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from l2r.recipes.changes import merge, read_change, set_field
from l2r.recipes.schema import LanguageRecipe
from l2r.recipes.vision import VisionRecipe
from l2r.routers.config import nearest

AnyRecipe = LanguageRecipe | VisionRecipe
_KINDS: dict[Any, type[AnyRecipe]] = {"language": LanguageRecipe, "vision": VisionRecipe}
_MAX_BASES = 5


def recipe_names() -> list[str]:
    """Packaged recipes, e.g. ``demo/l2r-sips``; files that start with ``_`` are bases."""
    root = Path(str(files("l2r.recipes")))
    paths = sorted(root.rglob("*.yaml"))
    return [str(p.relative_to(root).with_suffix("")) for p in paths if p.name[0] != "_"]


def recipes_in(folder: str) -> list[str]:
    """Packaged recipes directly inside ``folder``. Raises ValueError when there are none."""
    names = [name for name in recipe_names() if str(Path(name).parent) == folder]
    if not names:
        folders = sorted({str(Path(name).parent) for name in recipe_names()})
        raise ValueError(f"unknown recipe folder {folder!r}; known: {', '.join(folders)}")
    return names


def recipe_header(name: str) -> str:
    """The comment lines that open a packaged recipe: what it reproduces and how."""
    lines = _find(name).read_text(encoding="utf-8").splitlines()
    header = []
    for line in lines:
        if not line.startswith("#"):
            break
        header.append(line.lstrip("# ").rstrip())
    return "\n".join(header)


def load_recipe(name: str, changes: Sequence[str] = ()) -> AnyRecipe:
    """Recipe from a packaged name or a path, with ``key.sub=value`` changes applied in order.

    Another ``router.kind`` keeps the options that it reads as well; of steps, tokens and epochs the
    one given last holds.

    Raises ValueError, in one line, for an unknown recipe, a broken file, an unknown field (with
    the nearest known name) or a value out of its limits.
    """
    values = _read(_find(name))
    # The router first: the options given for it hold for the new one, wherever they stand.
    for change in sorted(changes, key=lambda change: not change.startswith("router.kind=")):
        values = set_field(values, *read_change(change))
    return parse_recipe(values, source=name)


def parse_recipe(values: dict[str, Any], *, source: str) -> AnyRecipe:
    """Check plain values against the schema; ``source`` names them in errors."""
    task = values.get("task")
    if not isinstance(task, str) or task not in _KINDS:
        raise ValueError(f"recipe {source}: task must be {' or '.join(_KINDS)}; got {task!r}")
    kind = _KINDS[task]
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"recipe {source}: {_first_problem(error, kind)}") from error


def dump_recipe(recipe: AnyRecipe) -> str:
    """The whole recipe as YAML, every field written out."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _find(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"recipe file {name} does not exist")
        return path
    path = Path(str(files("l2r.recipes"))) / f"{name}.yaml"
    if ".." in Path(name).parts or not path.is_file():
        hint = nearest(name, recipe_names())
        raise ValueError(f"unknown recipe {name!r}{hint}; l2r train --list shows all")
    return path


def _read(path: Path, depth: int = 0) -> dict[str, Any]:
    """Values of a file over those of the recipe its ``base`` names."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"recipe {path} must be a mapping of fields; got {type(values).__name__}")
    base = values.pop("base", None)
    if base is None:
        return values
    if depth >= _MAX_BASES:
        raise ValueError(f"recipe {path} has more than {_MAX_BASES} bases; is one its own base?")
    return merge(_read(_find(str(base)), depth + 1), values)


def _first_problem(error: ValidationError, recipe: type[AnyRecipe]) -> str:
    """The first problem of a pydantic error in one line, with the nearest name if one is wrong."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"]]
    where = ".".join(place)
    if problem["type"] == "extra_forbidden":
        section: Any = recipe
        for part in place[:-1]:
            section = section.model_fields[part].annotation
        return f"unknown field {where}{nearest(place[-1], section.model_fields)}"
    message = problem["msg"].removeprefix("Value error, ")
    given = "" if problem["type"] in ("missing", "value_error") else f"; got {problem['input']!r}"
    return f"{where}: {message}{given}" if where else f"{message}{given}"
