"""Running a registered plan: cells shared among processes, results kept.

Every process of a study walks the same list and takes what nobody has done or holds, so a killed
one loses its cell alone, and a second command, here or on a shared disk, helps the first.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from l2r.errors import InputError
from l2r.machine import describe_machine
from l2r.runs.atomic import hold, make_folder
from l2r.runs.folder import RunFolder
from l2r.runs.study import CellResult
from l2r.studies.cells import Cell
from l2r.studies.judging import Places
from l2r.studies.measure import measure
from l2r.studies.registration import Registered, source_tree
from l2r.studies.train_cells import run_cells

Report = Callable[[str], None]


def run_share(
    plan: Registered,
    cells: Sequence[Cell],
    places: Places,
    *,
    limit: int | None = None,
    report: Report = lambda line: None,
) -> tuple[int, int | None]:
    """Train and measure cells that nobody has done or holds: failures, and the signal that came.

    Ends after ``limit`` of them, and when the process that started this one is gone. A plan of
    whole seeds has its cells taken seed by seed, which ``limit`` then counts: a seed's results are
    stored together, and one that was interrupted begins again.
    """
    parent, failed, taken = os.getppid(), 0, 0
    whole, source = plan.plan.whole_seeds, source_tree()
    for part in _parts(cells, whole):
        name = f"seed-{part[0].recipe.seed}" if whole else part[0].name
        with _claimed(places.runs / ".claims" / name) as mine:
            measured = places.measured()
            done = sum((cell.arm, cell.recipe.seed) in measured for cell in part)
            if not mine or done == len(part):
                continue
            if done:
                raise InputError(
                    f"{places.stored().path} holds {done} of {len(part)} arms of {name}, which is "
                    "run whole or not at all; remove them"
                )
            if taken == limit or os.getppid() != parent:
                break
            taken += 1
            results = list[CellResult]()
            if whole:
                for cell in part:
                    shutil.rmtree(places.runs / cell.name, ignore_errors=True)
            for cell in part:
                label = f"[{1 + cells.index(cell)}/{len(cells)}] {cell.name}"
                ended = _run(plan, cell, places, source, label, report)
                if isinstance(ended, CellResult):
                    results.append(ended)
                elif ended is not None:
                    return failed, ended
                else:
                    failed += 1
                    break
            if len(results) == len(part):
                places.stored().append(*results)
                for cell in part if not places.keep_runs else ():
                    shutil.rmtree(places.runs / cell.name)
    return failed, None


def _parts(cells: Sequence[Cell], whole: bool) -> list[list[Cell]]:
    """What is stored together: each cell, or all cells of a seed."""
    if not whole:
        return [[cell] for cell in cells]
    seeds = dict.fromkeys(cell.recipe.seed for cell in cells)
    return [[cell for cell in cells if cell.recipe.seed == seed] for seed in seeds]


def _run(
    plan: Registered,
    cell: Cell,
    places: Places,
    source: dict[str, Any],
    label: str,
    report: Report,
) -> CellResult | int | None:
    """Train and measure a cell: its result, the signal that came, or None where it failed."""
    run = RunFolder(places.runs / cell.name)
    start, resumed = time.perf_counter(), run.is_run()
    (outcome,) = run_cells([cell], places.runs, show_progress=False)
    if outcome.signal is not None:
        return outcome.signal
    if outcome.error is not None:
        report(f"failed: {cell.name}: {outcome.error}")
        return None
    trained, untrained = measure(run, cell.recipe, plan.plan.sample)
    seconds = None if resumed else round(time.perf_counter() - start, 1)
    counts = _counts(run, run.read_json(run.environment))
    facts = {"seconds": seconds, **describe_machine(), "source": source, **counts}
    recipe = cell.recipe.model_dump(mode="json")
    curve = _curve(run, cell.recipe.training.log_every)
    report(
        f"{label}: validation CE {trained['validation_ce']:.3f}, "
        f"{time.perf_counter() - start:.0f} s"
    )
    return CellResult(
        cell.arm, cell.recipe.seed, trained, untrained, curve, recipe, plan.mark(), facts
    )


def _curve(run: RunFolder, every: int) -> list[tuple[int, float]]:
    """Mean training loss of every so many steps; a run that was stopped logged some in parts."""
    curve, part = [], list[dict[str, Any]]()
    records = run.read_metrics("train_mean")
    for record in records:
        part.append(record)
        if record["step"] % every == 0 or record is records[-1]:
            total = sum(r["ce"] * r["steps"] for r in part)
            curve.append((record["step"], total / sum(r["steps"] for r in part)))
            part = []
    return curve


def _counts(run: RunFolder, environment: dict[str, Any]) -> dict[str, Any]:
    """Sizes and length of a run."""
    last = run.read_metrics("train")[-1]
    names = ("router", "parameters", "router_parameters", "data")
    variables = {name: environment[name] for name in names if name in environment}
    return {**variables, "steps": last["step"], "units": last.get("tokens", last.get("images"))}


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Whether this process holds the cell inside the block; a lock dies with its process."""
    make_folder(path.parent.parent, path.parent.name)
    with hold(path) as mine:
        yield mine
