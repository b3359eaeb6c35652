"""Running a registered plan: cells shared among processes, results kept, verdicts.

Every process of a study walks the same list and takes what nobody has done or holds, so a killed
one loses its cell alone, and a second command, here or on a shared disk, helps the first.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from l2r.experiments.cells import Cell
from l2r.experiments.measure import measure
from l2r.experiments.plan import Plan, Registered
from l2r.experiments.run import run_cells
from l2r.machine import describe_machine
from l2r.recipes.load import AnyRecipe, parse_recipe
from l2r.runs.contrasts import Judged, Pairs, judge
from l2r.runs.folder import RunFolder
from l2r.runs.study import CellResult, ScreenDesign, Study, read_result
from l2r.training.signals import stop_on_signals

Report = Callable[[str], None]


@dataclass(frozen=True)
class Places:
    """results: where the files of the cells are kept. runs: where cells are trained."""

    results: Path
    runs: Path
    keep_runs: bool = False

    def result(self, cell: Cell) -> Path:
        """File of a cell."""
        return self.results / f"{cell.name}.json"


def run_share(
    plan: Registered,
    cells: Sequence[Cell],
    places: Places,
    *,
    limit: int | None = None,
    report: Report = lambda line: None,
) -> tuple[int, int | None]:
    """Train and measure cells that nobody has done or holds: failures, and the signal that came.

    Ends after ``limit`` of them, and when the process that started this one is gone.
    """
    parent, failed, taken = os.getppid(), 0, 0
    for number, cell in enumerate(cells, start=1):
        path, run = places.result(cell), RunFolder(places.runs / cell.name)
        with _claimed(places.runs / ".claims" / cell.name) as mine:
            if not mine or path.is_file():
                continue
            if taken == limit or os.getppid() != parent:
                break
            taken += 1
            start, resumed = time.perf_counter(), run.is_run()
            (outcome,) = run_cells([cell], places.runs, show_progress=False)
            if outcome.signal is not None:
                return failed, outcome.signal
            if outcome.error is not None:
                report(f"failed: {cell.name}: {outcome.error}")
                failed += 1
                continue
            trained, untrained = measure(run, cell.recipe, plan.plan.sample)
            seconds = None if resumed else round(time.perf_counter() - start, 1)
            environment = run.read_json(run.environment)
            facts = {"seconds": seconds, **describe_machine(), **_counts(run, environment)}
            recipe = cell.recipe.model_dump(mode="json")
            curve = [(r["step"], r["ce"]) for r in run.read_metrics("train_mean")]
            CellResult(
                cell.arm, cell.recipe.seed, trained, untrained, curve, recipe, plan.mark(), facts
            ).save(path)
            if not places.keep_runs:
                shutil.rmtree(run.path)
            report(
                f"[{number}/{len(cells)}] {cell.name}: validation CE "
                f"{trained['validation_ce']:.3f}, {time.perf_counter() - start:.0f} s"
            )
    return failed, None


def run_processes(
    command: Sequence[str], processes: int, threads: int
) -> tuple[list[int], int | None]:
    """Start a command several times over and wait: exit codes, and the signal that we got.

    A signal is handed on, so that every run saves before it ends.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with stop_on_signals() as stop:
        # Not in our process group: Ctrl-C would reach them twice, and the second one kills.
        started = [
            subprocess.Popen(command, env=environment, stdout=sys.stderr, start_new_session=True)
            for _ in range(processes)
        ]
        told = False
        while any(process.poll() is None for process in started):
            if stop.signal is not None and not told:
                told = True
                for process in started:
                    process.send_signal(stop.signal)
            time.sleep(0.2)
        codes = [process.returncode for process in started]
        return codes, None if stop.signal is None else int(stop.signal)


def own_processes() -> tuple[int, int]:
    """Processes and threads of each that use this machine best: one of one thread per core.

    At the size of the demo two processes of one thread did 1.4 to 4 times the work of one process
    of two threads (docs/evidence.md). A GPU gets one process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (1, cores or 1) if torch.cuda.is_available() else (cores or 1, 1)


def results_of(plan: Registered, cells: Sequence[Cell], places: Places) -> list[CellResult]:
    """Results of the cells that have one. Raises ValueError for one of another recipe."""
    found = []
    for cell in cells:
        path = places.result(cell)
        if path.is_file():
            result = read_result(path)
            stored: AnyRecipe = parse_recipe(dict(result.recipe), source=str(path))
            if _meaning(stored) != _meaning(cell.recipe):
                raise ValueError(
                    f"{path} holds a run of another recipe than plan {plan.name} says; choose "
                    "other --results"
                )
            found.append(result)
    return found


def judge_plan(plan: Plan, results: Sequence[CellResult]) -> list[Judged]:
    """Verdicts over the seeds that both arms of a contrast have."""
    by_cell = {(result.arm, result.seed): result for result in results}
    pairs = []
    for contrast in plan.contrasts:
        seeds = sorted(
            {seed for arm, seed in by_cell if arm == contrast.first}
            & {seed for arm, seed in by_cell if arm == contrast.second}
        )
        sides = [
            [_value(getattr(by_cell[arm, seed], when), contrast.metric) for seed in seeds]
            for when in ("trained", "untrained")
            for arm in (contrast.first, contrast.second)
        ]
        pairs.append(Pairs(*sides))
    return judge(plan.contrasts, pairs, alpha=plan.alpha, margins=plan.margins)


def study_of(plan: Registered, results: Sequence[CellResult]) -> Study:
    """Plan, results and verdicts as plain values; registered only if the results are so too."""
    section, state = plan.plan, plan.state
    late = [r for r in results if r.plan["digest"] != plan.digest or r.plan["commit"] is None]
    if plan.commit and late:
        state = (
            f"not registered: {len(late)} of {len(results)} results are older than the plan as it "
            f"stands in {plan.commit}"
        )
    screens = {
        name: ScreenDesign(
            screen.factors_levels(),
            screen.interactions,
            dict(zip(screen.arms(name), screen.cells, strict=True)),
        )
        for name, screen in section.screens.items()
    }
    return Study(
        name=plan.name,
        title=section.title,
        question=section.question,
        state=state,
        alpha=section.alpha,
        margins=section.margins,
        sd=section.sd,
        least=section.seeds.least,
        most=section.seeds.most,
        arms=list(section.all_arms()),
        screens=screens,
        judged=judge_plan(section, results),
        results=results,
    )


def is_decided(plan: Plan, judged: Sequence[Judged]) -> bool:
    """Whether the stopping rule adds no more seeds: every primary interval is narrow enough."""
    primary = [j for j in judged if j.contrast.primary]
    if plan.half_width is None:
        return False
    return all(j.difference.half < plan.half_width for j in primary)


def seeds_that_fit(
    plan: Plan, results: Sequence[CellResult], hours: float, processes: int, most: int
) -> int:
    """Seeds that all arms can have in the time, from the seconds of the cells measured so far.

    What is done already costs nothing more. Raises ValueError without a timed cell.
    """
    here = describe_machine()["processor"]
    timed = [r.facts for r in results if r.facts["processor"] == here and r.facts["seconds"]]
    seconds = [float(facts["seconds"]) for facts in timed]
    if not seconds:
        raise ValueError("hours need the time of a cell, and none was measured on this machine")
    left = hours * 3600 * processes * len(seconds) / sum(seconds)
    done, arms = {(r.arm, r.seed) for r in results}, plan.all_arms()
    fit = 0
    for seed in range(plan.seeds.first, plan.seeds.first + most):
        left -= sum((arm, seed) not in done for arm in arms)
        if left < 0:
            break
        fit += 1
    return fit


def _value(measures: Any, metric: str) -> float:
    if metric not in measures:
        raise ValueError(f"contrasts: no metric {metric!r}; measured: {', '.join(measures)}")
    return float(measures[metric])


def _counts(run: RunFolder, environment: dict[str, Any]) -> dict[str, Any]:
    """Sizes and length of a run."""
    last = run.read_metrics("train")[-1]
    names = ("router", "parameters", "router_parameters", "data")
    kept = {name: environment[name] for name in names if name in environment}
    return {**kept, "steps": last["step"], "units": last.get("tokens", last.get("images"))}


def _meaning(recipe: AnyRecipe) -> Any:
    return recipe.model_dump(exclude={"router"}), recipe.router_config()


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Whether this process holds the cell inside the block; a lock dies with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
