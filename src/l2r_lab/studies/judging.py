"""Judging a plan: its results, and a page's facts (verdicts: stats/contrasts.py)."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from l2r.errors import InputError
from l2r.machine import describe_machine
from l2r_lab.files.study import (
    AT_THE_END,
    OF_TEXT,
    CellResult,
    ScreenDesign,
    Study,
    StudyResults,
    hardware,
)
from l2r_lab.stats.contrasts import Contrast, Judged, Pairs, judge
from l2r_lab.studies.cells import Cell
from l2r_lab.studies.registration import WITHOUT_PLAN, RegisteredPlan, doubtful_commits
from l2r_lab.studies.study_plan import StudyPlan
from l2r_lab.training import differing_fields, recipe_meaning
from l2r_lab.training.recipes import parse_recipe


@dataclass(frozen=True)
class StudyPlaces:
    """results: folder of the study's file of results. runs: where cells are trained."""

    results: Path
    runs: Path
    keep_runs: bool = False

    def stored(self) -> StudyResults:
        """File of all results."""
        return StudyResults(self.results)

    def ended(self) -> str:
        """Read why the study was ended before its last seed, in ended.txt; empty without it."""
        path = self.results / "ended.txt"
        return " ".join(path.read_text(encoding="utf-8").split()) if path.is_file() else ""

    def measured(self) -> set[tuple[str, int]]:
        """Arm and seed of every cell that has a result."""
        return {(result.arm, result.seed) for result in self.stored().read()}


def results_of(
    plan: RegisteredPlan, cells: Sequence[Cell], places: StudyPlaces
) -> list[CellResult]:
    """Results of the cells that have one; of a plan of whole seeds, those of seeds that are whole.

    Raises ValueError for a result of another recipe.
    """
    stored = {(result.arm, result.seed): result for result in places.stored().read()}
    meanings: dict[str, dict[str, Any]] = {}  # of stored recipes without their seeds
    results = []
    for cell in cells:
        result = stored.get((cell.arm, cell.recipe.seed))
        if result is None:
            continue
        fields = {**result.recipe, "seed": 0}
        key = json.dumps(fields, sort_keys=True)
        if key not in meanings:
            source = str(places.stored().path)
            meanings[key] = recipe_meaning(parse_recipe(fields, source=source))
        planned = recipe_meaning(cell.recipe.model_copy(update={"seed": 0}))
        if meanings[key] != planned:
            raise InputError(
                f"{places.stored().path} holds a run of another recipe than plan {plan.name} says "
                f"({cell.name}: {differing_fields(meanings[key], planned)}); choose other --results"
            )
        results.append(result)
    if plan.plan.whole_seeds:
        runs, arms = Counter(result.seed for result in results), len(plan.plan.all_arms())
        results = [result for result in results if runs[result.seed] == arms]
    return results


def judge_plan(plan: StudyPlan, results: Sequence[CellResult]) -> list[Judged]:
    """Verdicts over the seeds for which both arms of a contrast have its metric.

    None with fewer than the plan's least.
    """
    by_arm: dict[str, dict[int, CellResult]] = {}
    for result in results:
        by_arm.setdefault(result.arm, {})[result.seed] = result
    return judge(
        plan.contrasts,
        [_pairs(contrast, by_arm) for contrast in plan.contrasts],
        alpha=plan.alpha,
        margins=plan.margins,
        least=plan.seeds.least,
        first=plan.seeds_that_decide(),
        by_training=plan.learned_metrics(),
        secondary=plan.judge_secondary,
    )


def _pairs(contrast: Contrast, by_arm: Mapping[str, Mapping[int, CellResult]]) -> Pairs:
    """Both sides of a contrast, for the seeds that have its metric in all its arms."""
    metric, sides = contrast.metric, list[list[float]]()
    times = ("trained",) if metric in (*AT_THE_END, *OF_TEXT) else ("trained", "untrained")
    arms = (contrast.first, contrast.second, *(contrast.since or ()))
    having = (
        {s for s, r in by_arm.get(a, {}).items() if all(metric in getattr(r, t) for t in times)}
        for a in arms
    )
    seeds = sorted(set[int].intersection(*having))
    for when in times:
        values = [[getattr(by_arm[a][s], when)[metric] for s in seeds] for a in arms]
        if contrast.since:
            pairs = zip(values[:2], values[2:], strict=True)
            values = [[x - y for x, y in zip(now, old, strict=True)] for now, old in pairs]
        sides += values
    return Pairs(*sides)


def study_of(plan: RegisteredPlan, results: Sequence[CellResult], ended: str = "") -> Study:
    """Plan, results and verdicts as plain values; registered only if the results are so too.

    ``ended``: why it was ended early, as ``StudyPlaces.ended`` says.
    """
    section = plan.plan
    screens = {
        name: ScreenDesign(
            screen.factors_levels(),
            screen.interactions,
            dict(zip(screen.arms(name), screen.cells, strict=True)),
        )
        for name, screen in section.screens.items()
    }
    runs = Counter(result.seed for result in results)
    seeds = sum(count == len(section.all_arms()) for count in runs.values())
    return Study(
        name=plan.name,
        title=section.title,
        question=section.question,
        prediction=section.prediction,
        state=_state(plan, results),
        added_by_training=section.added_by_training,
        judge_secondary=section.judge_secondary,
        alpha=section.alpha,
        margins=section.margins,
        sd=section.sd,
        least=section.seeds.least,
        most=section.seeds.most,
        first=section.seeds_that_decide(),
        seeds=seeds,
        ended=ended,
        closed=plan.closed,
        arms=list(section.all_arms()),
        screens=screens,
        judged=judge_plan(section, results),
        results=results,
    )


def _state(plan: RegisteredPlan, results: Sequence[CellResult]) -> str:
    """State of the plan, and what the commits that results name show of it."""
    other = [r for r in results if r.plan["digest"] != plan.digest]
    late = [r for r in results if r in other or r.plan["commit"] is None]
    if plan.commit and late:
        return (
            f"not registered: {len(late)} of {len(results)} results are older than the plan as it "
            f"stands in {plan.commit}"
        )
    edited = f"{len(other)} of {len(results)} results were made under another text of the plan"
    named = Counter(str(r.plan["commit"]) for r in results if r.plan["commit"])
    marks = Counter[str]()
    for commit, reason in doubtful_commits(plan, named).items():
        marks[reason] += named[commit]
    counts = [f"{n} of {len(results)} results name a commit that {why}" for why, n in marks.items()]
    if plan.commit and WITHOUT_PLAN in marks:
        return f"not registered: {'; '.join(counts)}; the first that does is {plan.commit}"
    return "; ".join([plan.state, *([edited] if other else []), *counts])


def cell_seconds(results: Sequence[CellResult]) -> list[float]:
    """Seconds of the cells that ran on this machine without a stop."""
    here = hardware(describe_machine())
    timed = [r.facts for r in results if hardware(r.facts) == here and r.facts["seconds"]]
    return [float(facts["seconds"]) for facts in timed]


def seeds_that_fit(
    plan: StudyPlan, results: Sequence[CellResult], hours: float, processes: int, most: int
) -> int:
    """Seeds that all arms can have in the time, from the seconds of the cells measured so far.

    What is done already costs nothing more. Raises ValueError without a timed cell.
    """
    seconds = cell_seconds(results)
    if not seconds:
        raise InputError("hours need the time of a cell, and none was measured on this machine")
    left = hours * 3600 * processes * len(seconds) / sum(seconds)
    done, arms = {(r.arm, r.seed) for r in results}, plan.all_arms()
    fit = 0
    for seed in range(plan.seeds.first, plan.seeds.first + most):
        left -= sum((arm, seed) not in done for arm in arms)
        if left < 0:
            break
        fit += 1
    return fit
