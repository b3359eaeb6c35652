"""Run a registered plan seed by seed, until its seeds are whole or time runs out.

The processes of a study share its cells by the walk of running.py, and each stores its results, so
a second command, here or on a shared disk, helps the first.
"""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from l2r.errors import InputError
from l2r.files.folder import RunFolder
from l2r.machine import describe_machine
from l2r_lab.files.study import CellResult
from l2r_lab.studies.cells import Cell
from l2r_lab.studies.judging import StudyPlaces, cell_seconds, results_of, seeds_that_fit
from l2r_lab.studies.measure import measure
from l2r_lab.studies.registration import RegisteredPlan, source_tree
from l2r_lab.studies.running import LOCKS, Ended, Job, own_processes, run_processes, walk
from l2r_lab.studies.train_cells import train_cell

Report = Callable[[str], None]
_ALL = 1_000_000  # cells


@dataclass(frozen=True)
class Budget:
    """seeds: at most so many. hours: as many seeds as fit; None for no limit. processes: runs at
    a time; None for what suits the machine."""

    seeds: int
    hours: float | None = None
    processes: int | None = None


class StudyStoppedError(Exception):
    """Runs did not all end: ``signal`` that stopped them, or None where some failed."""

    def __init__(self, signal: int | None) -> None:
        super().__init__("stopped" if signal is not None else "failed")
        self.signal = signal


def run_plan(
    plan: RegisteredPlan,
    source: str,
    places: StudyPlaces,
    budget: Budget,
    report: Callable[[str], None],
) -> list[CellResult]:
    """Run missing cells of a plan; return all results.

    ``source`` is the plan's packaged name or path, by which the processes read it; the folders of
    ``places`` must end in the plan's name. All arms get the first seed, then the next.

    Raises StudyStoppedError where runs were stopped or failed, ValueError as ``results_of`` does.
    """
    schedule = _Schedule(plan, source, places, budget, report)
    return schedule.run()


class _Schedule:
    def __init__(
        self,
        plan: RegisteredPlan,
        source: str,
        places: StudyPlaces,
        budget: Budget,
        report: Callable[[str], None],
    ) -> None:
        self.registered, self.source, self.places = plan, source, places
        self.plan, self.budget, self.report = plan.plan, budget, report
        self.processes, self.threads = own_processes()
        if budget.processes is not None:
            cores = self.processes * self.threads
            self.processes, self.threads = budget.processes, max(1, cores // budget.processes)

    def run(self) -> list[CellResult]:
        start, budget = time.monotonic(), self.budget
        arms = len(self.plan.all_arms())
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        self.report(
            f"{self.registered.name}: {arms} arms, {self.processes} at a time with {threads} each"
        )
        if budget.hours is not None:
            # A cell in every process shows how long one takes, unless it was begun before.
            if not cell_seconds(self.measure(budget.seeds, cells=1)):
                self.measure(budget.seeds, cells=1)
            left = budget.hours - (time.monotonic() - start) / 3600
            so_far = self.results(budget.seeds)
            if len(so_far) == len(self.plan.cells(budget.seeds)):
                return so_far
            fit = seeds_that_fit(self.plan, so_far, left, self.processes, budget.seeds)
            self.report(f"{budget.hours:g} hours fit {fit} of at most {budget.seeds} seeds here")
            return self.measure(fit) if fit else so_far
        return self.measure(budget.seeds)

    def results(self, seeds: int) -> list[CellResult]:
        return results_of(self.registered, self.plan.cells(seeds), self.places)

    def measure(self, seeds: int, cells: int = _ALL) -> list[CellResult]:
        """Results of the first seeds, after every process ran at most ``cells`` missing cells."""
        measured = self.places.measured()
        if any((c.arm, c.recipe.seed) not in measured for c in self.plan.cells(seeds)):
            command = [sys.executable, "-m", "l2r", "evidence", self.source, "--seeds", str(seeds)]
            command += ["--results", str(self.places.results.parent)]
            command += ["--out", str(self.places.runs.parent), "--cells-only", str(cells)]
            command += ["--keep-runs"] if self.places.keep_runs else []
            codes, signal = run_processes(command, self.processes, self.threads)
            if signal is not None or any(codes.values()):
                raise StudyStoppedError(signal)
        return self.results(seeds)


def run_share(
    plan: RegisteredPlan,
    cells: Sequence[Cell],
    places: StudyPlaces,
    *,
    limit: int | None = None,
    report: Report = lambda line: None,
) -> tuple[int, int | None]:
    """Train and measure cells that nobody has done or holds: failures, and the signal that came.

    Ends after ``limit`` of them, and when the process that started this one is gone. A plan of
    whole seeds has its cells taken seed by seed, which ``limit`` then counts: a seed's results are
    stored together, and one that was interrupted begins again.
    """
    whole, source = plan.plan.whole_seeds, source_tree()

    def work(name: str, part: Sequence[Cell]) -> Ended | None:
        measured = places.measured()
        done = sum((cell.arm, cell.recipe.seed) in measured for cell in part)
        if done == len(part):
            return None
        if done:
            raise InputError(
                f"{places.stored().path} holds {done} of {len(part)} arms of {name}, which is "
                "run whole or not at all; remove them"
            )
        for cell in part if whole else ():
            shutil.rmtree(places.runs / cell.name, ignore_errors=True)
        results = list[CellResult]()
        for cell in part:
            label = f"[{1 + cells.index(cell)}/{len(cells)}] {cell.name}"
            result = _run(plan, cell, places, source, label, report)
            if isinstance(result, Ended):
                return result
            results.append(result)
        places.stored().append(*results)
        for cell in part if not places.keep_runs else ():
            shutil.rmtree(places.runs / cell.name)
        return Ended(True)

    jobs = []
    for part in _parts(cells, whole):
        name = f"seed-{part[0].recipe.seed}" if whole else part[0].name
        jobs.append(Job(name, partial(work, name, part)))
    failed = 0
    for _, ended in walk(jobs, places.runs / LOCKS, limit=limit):
        failed += ended.error is not None
        if ended.signal is not None:
            return failed, ended.signal
    return failed, None


def _parts(cells: Sequence[Cell], whole: bool) -> list[list[Cell]]:
    """Group what is stored together: each cell, or all cells of a seed."""
    if not whole:
        return [[cell] for cell in cells]
    seeds = dict.fromkeys(cell.recipe.seed for cell in cells)
    return [[cell for cell in cells if cell.recipe.seed == seed] for seed in seeds]


def _run(
    plan: RegisteredPlan,
    cell: Cell,
    places: StudyPlaces,
    source: dict[str, Any],
    label: str,
    report: Report,
) -> CellResult | Ended:
    """Train and measure a cell: its result, or how it ended without one."""
    run = RunFolder(places.runs / cell.name)
    start, resumed = time.perf_counter(), run.is_run()
    ended = train_cell(cell, places.runs, label, show_progress=False)
    if ended.error is not None:
        report(f"failed: {cell.name}: {ended.error}")
    if ended.error is not None or ended.signal is not None:
        return ended
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
