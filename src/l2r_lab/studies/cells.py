"""Runs of an experiment: the recipes of a folder or a grid, with seeds.

Each run has its own folder. Nothing else is kept: the folders say what is finished.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from l2r.errors import InputError
from l2r.files.folder import SEED_MARK, RunFolder
from l2r.files.reading import parse_yaml
from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.files.wording import known_as, nearest
from l2r_lab.training.recipes import (
    LENGTH_FIELDS,
    AnyRecipe,
    check_sections,
    load_recipe,
    packaged_recipes,
    parse_recipe,
    recipe_values,
    recipes_in,
    set_field,
)

_ROUTER = "router."
_KIND = "router.kind"
Grid = dict[str, list[Any]]


@dataclass(frozen=True)
class Cell:
    """One run: a recipe with one seed. Runs that differ in the seed alone share ``arm``.

    settings: the grid's values in force here, by field. folder: of a run that was made elsewhere.
    """

    arm: str
    name: str
    recipe: AnyRecipe
    settings: Mapping[str, Any]
    folder: Path | None = None

    def run(self, root: Path) -> RunFolder:
        """Its folder: in ``root``, unless the run was made elsewhere."""
        return RunFolder(self.folder or root / self.name)


def folder_cells(
    folder: str, changes: Sequence[str], routers: Sequence[str] | None, seeds: int
) -> list[Cell]:
    """One packaged recipe for every router of a folder, or for those named, in their order.

    The run with a recipe's own seed is called by the router alone. Raises ValueError for a router
    that the folder does not have, and for another kind.
    """
    names: dict[str, str] = {}
    for name in recipes_in(folder):
        router = packaged_recipes()[name].router
        if router is not None:
            names.setdefault(router, name)  # of two sizes the first
    order = [kind for kind in PAPER_ROUTERS if kind in names]
    order += [router for router in names if router not in order]
    routers = list(dict.fromkeys(known_as(router, order) for router in routers or ()))
    for router in routers:
        if router not in order:
            raise InputError(f"routers must be among {', '.join(order)}; got {router!r}")
    recipes: dict[str, AnyRecipe] = {}
    for router, name in names.items():
        recipes[router] = load_recipe(name, changes)
        if recipes[router].router.kind != load_recipe(name).router.kind:
            raise InputError(f"{_KIND} differs between the recipes of a folder; use --routers")
    arms = [_with_seeds(r, recipes[r], seeds, first_unmarked=True) for r in routers or order]
    return _by_seed(arms)


def read_grid(axes: Sequence[str]) -> Grid:
    """``["router.rank=2,8"]`` as fields and values (YAML). Raises ValueError naming the axis."""
    grid: Grid = {}
    for axis in axes:
        field, separator, text = axis.partition("=")
        if not separator or not field:
            raise InputError(f"grid must look like key.sub=value,value; got {axis!r}")
        if field in grid or field == "seed":
            hint = "use --seeds" if field == "seed" else "give all its values at once"
            raise InputError(f"grid names {field} twice or in the wrong place; {hint}")
        try:
            values = parse_yaml(f"[{text}]")
        except InputError as error:
            raise InputError(
                f"grid {field} has values that are not valid YAML: {text!r}"
            ) from error
        if not values or None in values or any(v in values[:i] for i, v in enumerate(values)):
            raise InputError(f"grid {field} needs different values, at least one; got {text!r}")
        grid[field] = [_router_name(str(v)) for v in values] if field == _KIND else values
    lengths = [field for field in grid if field in LENGTH_FIELDS]
    if len(lengths) > 1:
        raise InputError(f"grid names {' and '.join(lengths)}, which replace each other; give one")
    if not grid:
        raise InputError("grid is missing; give at least one, e.g. --grid router.rank=2,8,32")
    return grid


def grid_cells(recipe: str, changes: Sequence[str], grid: Grid, seeds: int) -> list[Cell]:
    """Every cell of the grid with every seed, checked before anything is trained.

    A router option that a router does not have is left out for it, and choices that become
    equal that way are trained once. Raises ValueError for a bad recipe or value, and for a
    router option that no router of the grid has.
    """
    plain = recipe_values(recipe, changes)
    outside = [field for field in grid if not field.startswith(_ROUTER)]
    for choice in product(*(grid[field] for field in outside)):  # before torch is imported
        check_sections(_with_fields(plain, dict(zip(outside, choice, strict=True))), source=recipe)
    base = load_recipe(recipe, changes)
    values = base.model_dump(mode="json")
    _check_router_options(grid, values["router"]["kind"])
    cells: list[Cell] = []
    seen: list[dict[str, Any]] = []
    for choice in product(*grid.values()):
        settings = dict(zip(grid, choice, strict=True))
        options = _router_options(settings.get(_KIND, values["router"]["kind"]))
        settings = {
            field: value
            for field, value in settings.items()
            if not field.startswith(_ROUTER) or field.removeprefix(_ROUTER) in options
        }
        if settings in seen:
            continue
        seen.append(settings)
        cell_recipe = _recipe_of(values, settings, recipe)
        arm = ",".join(f"{_short(f, grid)}={as_word(v)}" for f, v in settings.items())
        cells += _with_seeds(arm, cell_recipe, seeds, settings=settings)
    names = [cell.name for cell in cells]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"grid gives two cells one folder name, {name!r}; rename a value")
    return cells


def _with_seeds(
    arm: str,
    recipe: AnyRecipe,
    seeds: int,
    *,
    settings: Mapping[str, Any] | None = None,
    first_unmarked: bool = False,
) -> list[Cell]:
    """Make a cell per seed, from the recipe's own on."""
    cells = []
    for repeat in range(seeds):
        seed = recipe.seed + repeat
        name = arm if first_unmarked and repeat == 0 else f"{arm}{SEED_MARK}{seed}"
        seeded = recipe.model_copy(update={"seed": seed})
        cells.append(Cell(arm, name, seeded, settings or {}))
    return cells


def _by_seed(arms: Sequence[Sequence[Cell]]) -> list[Cell]:
    """All arms with the first seed, then all with the next."""
    return [cell for repeat in zip(*arms, strict=True) for cell in repeat]


def _recipe_of(values: dict[str, Any], settings: Mapping[str, Any], source: str) -> AnyRecipe:
    """Return the base recipe with the cell's settings."""
    return parse_recipe(_with_fields(values, settings), source=source)


def _with_fields(values: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the settings in their places, the router's kind first."""
    for field in sorted(settings, key=lambda field: field != _KIND):
        values = set_field(values, field, settings[field])
    return values


def _router_name(name: str) -> str:
    """Return a router's name as it is registered, where the other spelling is given."""
    from l2r.routers.config import ROUTERS

    return known_as(name, ROUTERS)


def _check_router_options(grid: Grid, kind: str) -> None:
    kinds = grid.get(_KIND, [kind])
    options = set[str]().union(*(_router_options(k) for k in kinds))
    for field in grid:
        option = field.removeprefix(_ROUTER)
        if field.startswith(_ROUTER) and option not in options:
            names = ", ".join(map(str, kinds))
            raise InputError(f"grid: {names} has no option {option!r}{nearest(option, options)}")


def _router_options(kind: str) -> set[str]:
    """Fields that a router of this kind reads, ``kind`` among them."""
    from l2r.routers.config import options_of

    return {"kind", *options_of(kind)}


def _short(field: str, grid: Grid) -> str:
    """Last part of a field, or all of it where another field ends alike."""
    last = field.rpartition(".")[2]
    return field if sum(f.rpartition(".")[2] == last for f in grid) > 1 else last


def as_word(value: Any) -> str:
    """Return a value as a part of a folder name."""
    return re.sub(r"[^\w.+-]+", "-", str(value)).strip("-")
