"""Tables of a study: contrasts, precision, arms, effects and proposals of screens."""

import math
import statistics
from collections.abc import Sequence

from l2r.report.tables import Table
from l2r.stats.intervals import Interval
from l2r_lab.files.study import Study
from l2r_lab.report.evidence_figures import in_words
from l2r_lab.report.metric_names import METRICS, SMALL
from l2r_lab.report.screen_effects import effects_by_screen
from l2r_lab.report.study_verdict import of_study
from l2r_lab.stats.contrasts import Judged
from l2r_lab.stats.effects import Effect, best_by_fit
from l2r_lab.stats.paired_t import estimate

_COLUMNS = (
    "contrast", "verdict", "difference", "p", "seeds that decide", "why no verdict", "first",
    "second", "seeds", "at step 0", "plain paired t", "p equivalent", "metric", "kind", "paper",
)  # fmt: skip
_JUDGING = ("verdict", "p", "seeds that decide", "p equivalent")  # columns without which it is none


def method(study: Study) -> str:
    """Describe how contrasts are judged."""
    paired = "Differences are first - second, paired by seed, with intervals by Student's t."
    if all(j.verdict == "interval" for j in study.judged):
        return paired
    of_losses = "" if study.added_by_training == "all" else " of a loss"
    unadjusted = "are not adjusted" if study.judge_secondary else "have intervals and no verdicts"
    return (
        f"{paired} Better and worse need p <= alpha for the difference and{of_losses} for what "
        "training added to it since step 0 (the larger p is shown); equivalent needs both "
        "one-sided tests inside the plan's margin, and says on which side of 0 the interval lies. "
        "A contrast that is neither gets what its interval excludes. Primary p-values are Holm's "
        f"over all primary contrasts; secondary ones {unadjusted}."
    )


def contrast_table(study: Study, *, primary: bool | None = None) -> Table:
    """Tabulate contrasts, captioned with the method; ``primary`` picks one kind, for a page."""
    rows = [_row(j) for j in study.judged if primary in (None, j.contrast.primary)]
    unsaid = {"kind"} if primary is not None else set()
    unsaid |= {"paper"} if not any(j.contrast.where for j in study.judged) else set()
    shown = [j for j in study.judged if primary in (None, j.contrast.primary)]
    unsaid |= {"plain paired t"} if all(j.plain is None for j in shown) else set()
    unsaid |= {"why no verdict"} if not any(j.reason for j in shown) else set()
    unsaid |= set(_JUDGING) if all(j.verdict == "interval" for j in shown) else set()
    kept = [c for c, column in enumerate(_COLUMNS) if column not in unsaid]
    columns = tuple(_COLUMNS[c] for c in kept)
    rows = [tuple(row[c] for c in kept) for row in rows]
    title = {None: study.title, True: "Primary contrasts", False: "Secondary contrasts"}[primary]
    return Table(
        title,
        columns,
        tuple(rows),
        caption=method(study) if primary is None else "",
        few=("difference", "p", "verdict", "seeds that decide"),
        verdict=of_study(study).says,
    )


def first_table(judged: Sequence[Judged]) -> Table:
    """List contrasts in five columns and three digits, for the open part of a page."""
    rows = []
    for j in judged:
        digits = ".1e" if j.contrast.metric in SMALL else ".3f"
        pair = f"{j.contrast.first} vs {j.contrast.second}"
        if j.contrast.since:
            pair += f", since {' and '.join(j.contrast.since)}"
        metric = METRICS.get(j.contrast.metric, j.contrast.metric)
        p = "-" if j.verdict == "interval" else f"{j.p:.2g}"
        rows.append((pair, metric, show_interval(j.difference, digits), p, j.says(digits)))
    columns = ("first vs second", "metric", "first - second [95%]", "p", "verdict")
    return Table("", columns, tuple(rows))


def precision_table(study: Study) -> Table:
    """Table of precision by metric: deviations of paired differences and half-widths."""
    rows = []
    for metric in dict.fromkeys(j.contrast.metric for j in study.judged):
        own = [j for j in study.judged if j.contrast.metric == metric and j.seeds > 1]
        if own:
            sd = math.sqrt(statistics.fmean(j.sd**2 for j in own))
            widths = [sd, max(j.sd for j in own), max(j.difference.half for j in own)]
            shown = [f"{w:.2e}" for w in widths] if metric in SMALL else widths
            rows.append((METRICS.get(metric, metric), len(own), *shown))
    columns = (
        "metric", "contrasts", "SD of paired differences, rms", "largest SD", "widest half-width",
    )  # fmt: skip
    return Table("Precision reached", columns, tuple(rows))


def arm_table(study: Study) -> Table:
    """Means over the seeds of every arm, with step 0 of the losses and the gain."""
    rows = []
    measured = [m for m in METRICS if any(m in result.trained for result in study.results)]
    for arm in study.arms:
        seeds = len(study.values(arm, "validation_ce"))
        if seeds:
            ce = estimate(study.values(arm, "validation_ce")).interval(study.alpha)
            cells = [_shown(metric, study.values(arm, metric)) for metric in measured]
            before = [
                _mean(study.values(arm, metric, "untrained"))
                for metric in ("validation_ce", "routing_gain", "load_entropy")
            ]
            ends = (ce.half if seeds > 1 else None, *before, study.router_parameters(arm))
            rows.append((_words(arm), seeds, *cells, *ends))
    columns = (
        "arm", "seeds", *(METRICS[m] for m in measured), "validation CE ±",
        "validation CE, step 0", "routing gain, step 0", "load entropy, step 0",
        "router parameters",
    )  # fmt: skip
    return Table("Arms, means over seeds", columns, tuple(rows))


def seed_tables(study: Study) -> list[Table]:
    """Tabulate each metric of the primary contrasts, else validation CE: every arm by seed."""
    primary = dict.fromkeys(j.contrast.metric for j in study.judged if j.contrast.primary)
    tables = []
    for metric in primary or ("validation_ce",):
        values = {(r.arm, r.seed): r.trained[metric] for r in study.results if metric in r.trained}
        seeds = sorted({seed for _, seed in values})
        rows = tuple(
            (_words(arm), *(values.get((arm, seed)) for seed in seeds))
            for arm in study.arms
            if any((arm, seed) in values for seed in seeds)
        )
        columns = ("arm", *(f"seed {seed}" for seed in seeds))
        tables.append(Table(f"Every seed: {METRICS.get(metric, metric)}", columns, rows))
    return tables


def main_table(study: Study) -> Table:
    """Return the contrasts, or of a study that has none, what its screens propose."""
    return contrast_table(study) if study.judged or not study.screens else proposals(study)


def terminal_table(study: Study) -> Table:
    """Return the primary contrasts where there are any; else ``main_table``."""
    primary = any(j.contrast.primary for j in study.judged)
    return contrast_table(study, primary=True) if primary else main_table(study)


def proposals(study: Study) -> Table:
    """Table of each screen's proposals: best by its fit, and best of what was run."""
    rows = []
    for name, effects in effects_by_screen(study).items():
        screen = study.screens[name]
        cell, change = best_by_fit(screen.levels, screen.interactions, effects["validation_ce"])
        ran = {arm: study.values(arm, "validation_ce") for arm in screen.arms}
        best = min((arm for arm in ran if ran[arm]), key=lambda arm: statistics.fmean(ran[arm]))
        words = ", ".join(f"{f} {v}" for f, v in zip(screen.levels, cell, strict=True))
        rows.append((name, words, change, _words(best), statistics.fmean(ran[best])))
    columns = ("screen", "best by the fit", "change from all first levels", "best that was run")
    return Table(
        "Proposed: least validation CE",
        (*columns, "its validation CE"),
        tuple(rows),
        verdict=of_study(study).says,
    )


def _row(j: Judged) -> tuple[object, ...]:
    digits = ".2e" if j.contrast.metric in SMALL else ".4f"
    return (
        in_words(j.contrast),
        j.says(digits),
        show_interval(j.difference, digits),
        f"{j.p:.2g}",
        j.needed,
        j.reason,
        f"{j.contrast.first} {j.means[0]:{digits}}",
        f"{j.contrast.second} {j.means[1]:{digits}}",
        j.seeds,
        "-" if math.isnan(j.untrained.mean) else show_interval(j.untrained, digits),
        "-" if j.plain is None else f"{show_interval(j.plain, digits)}, p {j.p_plain:.2g}",
        "-" if j.p_equivalent is None else f"{j.p_equivalent:.2g}",
        j.contrast.metric,
        "primary" if j.contrast.primary else "secondary",
        j.contrast.where,
    )


def show_interval(value: Interval, digits: str = ".4f") -> str:
    """``+0.0123 [+0.0021, +0.0225]``."""
    return f"{value.mean:+{digits}} [{value.low:+{digits}}, {value.high:+{digits}}]"


def effect_table(name: str, effects: dict[str, list[Effect]]) -> Table:
    first: Sequence[Effect] = next(iter(effects.values()))
    rows = [
        (e.factor, e.level, *(show_interval(effects[m][i].change) for m in effects))
        for i, e in enumerate(first)
    ]
    columns = ("factor", "level", *(METRICS[metric] for metric in effects))
    return Table(f"Main effects: {name}", columns, tuple(rows))


def _words(arm: str) -> str:
    """Return the name of an arm with places where a column can break it."""
    return arm.replace(",", ", ")


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _shown(metric: str, values: Sequence[float]) -> float | str | None:
    """Make a mean; numbers of experts with one decimal, small ones with their exponent."""
    mean = _mean(values)
    if metric in SMALL and mean is not None:
        return f"{mean:.2e}"
    return f"{mean:.1f}" if metric == "first_experts" and mean is not None else mean
