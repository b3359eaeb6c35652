"""Verdicts of runs, sweeps and plans, each in one sentence."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from l2r.files.folder import SEED_MARK, RunFolder
from l2r.report.verdicts import Verdict
from l2r.stats.intervals import Interval
from l2r_lab.files.progress import read_progress
from l2r_lab.stats.paired_t import estimate

_ONE_SEED = (
    "Whether the order would hold with another seed: `--seeds 5` runs more. Routers have their "
    "recipe's settings and were not tuned alike."
)
_SEEDS = "Other sizes, data and budgets. Routers have their recipe's settings, not tuned alike."
_LEVEL = 0.05
# field of a validation record -> its name, its digits, and whether less is better
_JUDGED = {
    "ce/mean": ("validation CE", 3, True),
    "top1": ("top-1 accuracy", 3, False),
    "ce": ("validation CE", 3, True),
}


def of_runs(runs: Sequence[RunFolder]) -> Verdict:
    """Verdict of ended runs about their arms; runs that differ only in the seed are one arm."""
    arms: dict[str, list[RunFolder]] = {}
    for run in runs:
        arms.setdefault(run.name.partition(SEED_MARK)[0], []).append(run)
    return of_arms(arms)


def of_arms(arms: Mapping[str, Sequence[RunFolder]]) -> Verdict:
    """Verdict of each arm's ended runs, by its name; the first arm is the reference."""
    found = judged_values(arms)
    return found if isinstance(found, Verdict) else _of_values(found)


class JudgedValues(NamedTuple):
    """Values by which arms are judged, by seed; their name and digits, whether less is better."""

    name: str
    digits: int
    less: bool
    values: Mapping[str, Sequence[float]]

    @property
    def finite(self) -> dict[str, Sequence[float]]:
        """Values of the arms all of whose values are finite."""
        return {arm: own for arm, own in self.values.items() if all(map(math.isfinite, own))}


def judged_values(arms: Mapping[str, Sequence[RunFolder]]) -> JudgedValues | Verdict:
    """Find the values of the seeds that all arms have ended, or say why there are none."""
    ended = {name: [r for r in runs if read_progress(r).ended] for name, runs in arms.items()}
    last = {name: _results(runs) for name, runs in ended.items() if _results(runs)}
    if not last:
        return Verdict("No run is finished: nothing is compared yet.", _ONE_SEED)
    every = [record for by_seed in last.values() for record in by_seed.values()]
    held = [field for field in _JUDGED if all(field in record for record in every)]
    if not held:
        return Verdict("The finished runs share no validation result: nothing is compared.")
    unlike = _unlike_budgets(ended) or _unlike_texts(ended)
    if unlike:
        return Verdict(unlike)
    seeds = sorted(set[int].intersection(*(set(by_seed) for by_seed in last.values())))
    values = {arm: [float(last[arm][s][held[0]]) for s in seeds] for arm in last}
    if not seeds:
        return Verdict("The finished runs have no seed in common: nothing is compared.")
    return JudgedValues(*_JUDGED[held[0]], values)


def _of_values(judged: JudgedValues) -> Verdict:
    """Verdict of every arm's values, by seeds that all arms have."""
    name, digits, less, every = judged
    values = judged.finite
    lost = [arm for arm in every if arm not in values]
    tail = f" Not finite: {', '.join(lost)}." if lost else ""
    if not values:
        return Verdict(f"No {name} is finite: nothing is compared.{tail}")
    if len(values) == 1:
        ((arm, own),) = values.items()
        mean = sum(own) / len(own)
        seeds = seeds_in_words(len(own))
        return Verdict(f"{arm}: {name} {mean:.{digits}f}, {seeds}.{tail}", _ONE_SEED)
    if len(next(iter(values.values()))) == 1:
        order = sorted(values, key=lambda arm: values[arm][0], reverse=not less)
        first, rest = order[0], order[-1]
        return Verdict(
            f"One seed ranks nothing: {name} runs from {values[first][0]:.{digits}f} ({first}) to "
            f"{values[rest][0]:.{digits}f} ({rest}).{tail}",
            _ONE_SEED,
        )
    return Verdict(_against_first(values, judged) + tail, _SEEDS)


def _unlike_budgets(arms: Mapping[str, Sequence[RunFolder]]) -> str:
    """Sentence on runs that saw different amounts, unless an arm's name says so; else nothing."""
    if any(re.search(r"(steps|tokens|epochs)[= ]", arm) for arm in arms):
        return ""  # a sweep of the budget
    progress = [read_progress(run) for runs in arms.values() for run in runs]
    seen = sorted({p.seen for p in progress if p.seen is not None})
    if len(seen) < 2:
        return ""
    return f"Runs saw from {seen[0]:,} to {seen[-1]:,} {progress[0].unit}: nothing is compared."


def _unlike_texts(arms: Mapping[str, Sequence[RunFolder]]) -> str:
    """Sentence on runs whose held-out tokens differ, in text or tokenizer; else nothing."""
    held_out = set()
    for run in (run for runs in arms.values() for run in runs):
        data = run.read_json(run.environment).get("data")
        sums = data.get("text_sha256") if isinstance(data, dict) else None
        held_out.add(sums.split()[-1] if sums else None)  # of training, then of validation
    if len(held_out - {None}) < 2:
        return ""
    return "Runs are validated on other tokens than each other: nothing is compared."


def _results(runs: Sequence[RunFolder]) -> dict[int, Mapping[str, Any]]:
    """Return the last validation of each run by its seed."""
    by_seed = {
        run.read_recipe().get("seed", 0): run.read_metrics("validation")[-1:] for run in runs
    }
    return {seed: records[0] for seed, records in by_seed.items() if records}


def differences_from_first(values: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
    """Paired differences from the first arm, at 5% over all of them (Bonferroni)."""
    base, *others = values
    return {
        arm: estimate([a - b for a, b in zip(values[arm], values[base], strict=True)]).interval(
            _LEVEL / len(others)
        )
        for arm in others
    }


def _against_first(values: Mapping[str, Sequence[float]], judged: JudgedValues) -> str:
    """Name the arms that differ from the first, with the size, and those not shown to."""
    name, digits, less, _ = judged
    by_verdict: dict[str, list[str]] = {"better": [], "worse": [], "not shown to differ": []}
    for arm, interval in differences_from_first(values).items():
        if interval.low > 0 or interval.high < 0:  # neither of NaN
            size = f"{arm} by {abs(interval.mean):.{digits}f}"
            by_verdict["better" if (interval.mean < 0) == less else "worse"].append(size)
        else:
            by_verdict["not shown to differ"].append(arm)
    parts = [f"{verdict}: {', '.join(arms)}" for verdict, arms in by_verdict.items() if arms]
    base = next(iter(values))
    what = f"{name[0].upper()}{name[1:]} against {base} over {len(values[base])} seeds"
    return f"{what}: {'; '.join(parts)}."


def of_plan(plan: Mapping[str, Any]) -> Verdict:
    """Verdict of a plan: what to run, whether it fits and how long it takes."""
    best, above = plan["best"], plan["above"]
    peak = (best["simulated"] or best["formula"]) / 1e9
    form = f"training.parallel={best['parallel']} " if best["parallel"] != "ep" else ""  # not ours
    hours = "" if best["hours"] is None else f", {_duration(best['hours'])}"
    fits = "Fits" if best["fits"] else "Does not fit"
    says = (
        f"{fits} {best['gpus']} x {plan['gpu']['name']}: {form}"
        f"training.micro_batch={best['micro_batch']} "
        f"training.activation_checkpointing={str(best['checkpointing']).lower()}: {peak:.1f} GB "
        f"per GPU, {best['tokens_per_second']:,.0f} tokens/s{hours}."
    )
    if above and not above["fits"]:
        larger = (above["simulated"] or above["formula"]) / 1e9
        says += f" micro_batch {above['micro_batch']} does not: {larger:.1f} GB."
    return Verdict(says, "Times on your machine: they follow from stated rates, not from a run.")


def of_accuracies(overall: Mapping[str, Any], differences: Mapping[str, Mapping[str, Any]]) -> str:
    """Accuracy of one checkpoint, or how many differences from the first leave out 0."""
    if not differences:
        ((name, values),) = overall.items()
        measured = [(c, v) for c, v in values.items() if v is not None]
        if not measured:
            return f"{name}: no task has a result."
        column, (mean, low, high) = measured[-1]
        return f"{name}: {column} {mean:.1f}%, 95% interval {low:.1f} to {high:.1f}."
    every = [v for by_column in differences.values() for v in by_column.values() if v is not None]
    apart = sum(low > 0 or high < 0 for _, low, high in every)
    return (
        f"{apart} of {len(every)} differences from {next(iter(overall))} "
        f"{'has' if apart == 1 else 'have'} a 95% interval without 0 (paired by document, not "
        f"adjusted; {0.05 * len(every):.1f} expected by chance)."
    )


def _duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


def seeds_in_words(count: int) -> str:
    """Write ``1 seed`` or ``3 seeds``."""
    return f"{count} seed{'' if count == 1 else 's'}"
