"""A grid of runs: which cells there are, what each is called, and running those not finished.

A cell is one choice of the grid's values; each cell is trained with every seed, in a run folder
of its own. Nothing else is kept: the folders say what is finished.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from l2r.recipes.changes import LENGTHS, set_field
from l2r.recipes.load import AnyRecipe, dump_recipe, load_recipe, parse_recipe
from l2r.routers.config import nearest, options_of
from l2r.runs.atomic import write_text
from l2r.runs.folder import RunFolder
from l2r.training.loop import train
from l2r.training.signals import stop_on_signals

_ROUTER = "router."
_KIND = "router.kind"
Grid = dict[str, list[Any]]


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. ``settings`` are the grid's values in force here, by field."""

    name: str
    settings: Mapping[str, Any]
    seed: int
    recipe: AnyRecipe


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: ``error`` is one line, ``signal`` says that somebody stopped it."""

    cell: Cell
    folder: Path
    trained: bool = False
    error: str | None = None
    signal: int | None = None


def read_grid(axes: Sequence[str]) -> Grid:
    """``["router.rank=2,8"]`` as fields and values (YAML). Raises ValueError naming the axis."""
    grid: Grid = {}
    for axis in axes:
        field, separator, text = axis.partition("=")
        if not separator or not field:
            raise ValueError(f"grid must look like key.sub=value,value; got {axis!r}")
        if field in grid or field == "seed":
            hint = "use --seeds" if field == "seed" else "give all its values at once"
            raise ValueError(f"grid names {field} twice or in the wrong place; {hint}")
        try:
            values = yaml.safe_load(f"[{text}]")
        except yaml.YAMLError as error:
            raise ValueError(
                f"grid {field} has values that are not valid YAML: {text!r}"
            ) from error
        if not values or None in values or any(v in values[:i] for i, v in enumerate(values)):
            raise ValueError(f"grid {field} needs different values, at least one; got {text!r}")
        grid[field] = values
    lengths = [field for field in grid if field in LENGTHS]
    if len(lengths) > 1:
        raise ValueError(f"grid names {' and '.join(lengths)}, which replace each other; give one")
    if not grid:
        raise ValueError("grid is missing; give at least one, e.g. --grid router.rank=2,8,32")
    return grid


def plan_cells(recipe: str, changes: Sequence[str], grid: Grid, seeds: int) -> list[Cell]:
    """Every cell of the grid with every seed, checked before anything is trained.

    A router option that a router does not have is left out for it, and choices that become
    equal that way are trained once. Raises ValueError for a bad recipe or value, and for a
    router option that no router of the grid has.
    """
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
        for seed in range(base.seed, base.seed + seeds):
            seeded = cell_recipe.model_copy(update={"seed": seed})
            name = ",".join(f"{_short(f, grid)}={_word(v)}" for f, v in settings.items())
            cells.append(Cell(f"{name},seed={seed}", settings, seed, seeded))
    names = [cell.name for cell in cells]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"grid gives two cells one folder name, {name!r}; rename a value")
    return cells


def run_cells(
    cells: Sequence[Cell],
    root: Path,
    *,
    launch: str | None = None,
    report: Callable[[str], None] = lambda line: None,
    show_progress: bool = True,
) -> Iterator[Outcome]:
    """Train the cells one after another and say how each ended; stop after a signal.

    Finished cells are left as they are, unfinished ones go on from their newest checkpoint. A
    cell that fails does not stop the others. ``launch`` starts each cell as a process of its
    own, e.g. ``"torchrun --nproc-per-node 8"``; otherwise cells are trained in this process.
    """
    for number, cell in enumerate(cells, start=1):
        run = RunFolder(root / cell.name)
        label = f"[{number}/{len(cells)}] {cell.name}"
        if is_finished(run, cell.recipe):
            outcome = Outcome(cell, run.path)
        elif launch is None:
            outcome = _train_here(cell, run, label, report, show_progress=show_progress)
        else:
            report(label)
            outcome = _train_elsewhere(cell, run, shlex.split(launch))
        yield outcome
        if outcome.signal is not None:
            return


def is_finished(run: RunFolder, recipe: AnyRecipe) -> bool:
    """Whether the folder holds the final weights of just this recipe."""
    exports = [run.model, *([run.averaged_model] if recipe.training.ema_decay else [])]
    return (
        run.recipe.is_file()
        and run.recipe.read_text(encoding="utf-8") == dump_recipe(recipe)
        and all((folder / "config.json").is_file() for folder in exports)
    )


def _train_here(
    cell: Cell, run: RunFolder, label: str, report: Callable[[str], None], *, show_progress: bool
) -> Outcome:
    try:
        result = train(
            cell.recipe, run.path, label=label, report=report, show_progress=show_progress
        )
    except (ValueError, OSError, RuntimeError, MemoryError) as error:  # out of memory is the third
        text = " ".join(str(error).split()) or type(error).__name__
        return Outcome(cell, run.path, error=text)
    signal = None if result.finished else int(result.signal or 0)
    return Outcome(cell, run.path, trained=True, signal=signal)


def _train_elsewhere(cell: Cell, run: RunFolder, launcher: list[str]) -> Outcome:
    """One process per cell; a signal to us is handed on, so that the cell saves before it ends."""
    run.create()
    if not run.recipe.is_file():
        write_text(run.recipe, dump_recipe(cell.recipe))
    elif run.recipe.read_text(encoding="utf-8") != dump_recipe(cell.recipe):
        return Outcome(cell, run.path, error=f"{run.path} holds a run of another recipe")
    command = [*launcher, "-m", "l2r", "train", str(run.recipe), "--out", str(run.path)]
    with stop_on_signals() as stop:
        # Not in our process group: Ctrl-C would reach it twice, and the second one kills.
        with subprocess.Popen(command, stdout=sys.stderr, start_new_session=True) as process:
            while process.poll() is None:
                try:
                    process.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    if stop.signal is not None:
                        process.send_signal(stop.signal)
                        process.wait()
        if stop.signal is not None:
            return Outcome(cell, run.path, trained=True, signal=int(stop.signal))
    if process.returncode:
        return Outcome(cell, run.path, error=f"its process ended with code {process.returncode}")
    return Outcome(cell, run.path, trained=True)


def _recipe_of(values: dict[str, Any], settings: Mapping[str, Any], source: str) -> AnyRecipe:
    """The base recipe with the cell's settings, its router first."""
    for field in sorted(settings, key=lambda field: field != _KIND):
        values = set_field(values, field, settings[field])
    return parse_recipe(values, source=source)


def _check_router_options(grid: Grid, kind: str) -> None:
    kinds = grid.get(_KIND, [kind])
    known = set[str]().union(*(_router_options(k) for k in kinds))
    for field in grid:
        option = field.removeprefix(_ROUTER)
        if field.startswith(_ROUTER) and option not in known:
            names = ", ".join(map(str, kinds))
            raise ValueError(f"grid: {names} has no option {option!r}{nearest(option, known)}")


def _router_options(kind: str) -> set[str]:
    """Fields that a router of this kind reads, ``kind`` among them."""
    return {"kind", *options_of(kind)}


def _short(field: str, grid: Grid) -> str:
    """Last part of a field, or all of it where another field ends alike."""
    last = field.rpartition(".")[2]
    return field if sum(f.rpartition(".")[2] == last for f in grid) > 1 else last


def _word(value: Any) -> str:
    """A value as a part of a folder name."""
    return re.sub(r"[^\w.+-]+", "-", str(value)).strip("-")
