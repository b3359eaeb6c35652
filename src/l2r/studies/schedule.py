"""Run a plan seed by seed in processes of our own, until its stopping rule or the time ends it."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from l2r.runs.study import CellResult
from l2r.studies.judging import Places, is_decided, judge_plan, results_of, seeds_that_fit
from l2r.studies.processes import own_processes, run_processes
from l2r.studies.registration import Registered

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
    plan: Registered, source: str, places: Places, budget: Budget, report: Callable[[str], None]
) -> list[CellResult]:
    """Run what is missing of a plan; its results, which others may have made.

    ``source`` is the plan's packaged name or path, by which the processes read it; the folders of
    ``places`` must end in the plan's name. All arms get the first seed, then the next: at least
    the plan's least seeds, then one at a time until every primary interval is narrow enough.

    Raises StudyStoppedError where runs were stopped or failed, ValueError as ``results_of`` does.
    """
    schedule = _Schedule(plan, source, places, budget, report)
    return schedule.run()


class _Schedule:
    def __init__(
        self,
        plan: Registered,
        source: str,
        places: Places,
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
            self.measure(budget.seeds, cells=1)  # a cell in every process shows how long one takes
        results: list[CellResult] = []
        for seeds in range(min(self.plan.seeds.least, budget.seeds), budget.seeds + 1):
            if budget.hours is not None:
                left = budget.hours - (time.monotonic() - start) / 3600
                so_far = self.results(budget.seeds)
                fit = seeds_that_fit(self.plan, so_far, left, self.processes, budget.seeds)
                self.report(
                    f"{budget.hours:g} hours fit {fit} of at most {budget.seeds} seeds here"
                )
                if fit < seeds:
                    return self.measure(fit) if fit else so_far
            results = self.measure(seeds)
            decided = is_decided(self.plan, judge_plan(self.plan, results))
            if seeds >= self.plan.seeds.least and decided:
                self.report(f"{seeds} seeds: every primary interval is narrow enough")
                break
        return results

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
            if signal is not None or any(codes):
                raise StudyStoppedError(signal)
        return self.results(seeds)
