"""Contrasts of a study: paired differences over seeds, tested, and what each comes to.

A contrast that is *better* or *worse* passed two tests: of the difference, and of what training
added to it since step 0. *Equivalent* is two one-sided tests inside the margin. Holm's procedure
holds the error of each kind over all primary contrasts.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from l2r.runs.statistics import Interval

Verdict = Literal["better", "worse", "equivalent", "undecided"]


@dataclass(frozen=True)
class Contrast:
    """``first`` is better than ``second`` where its ``metric`` is smaller (or larger).

    primary: counted by Holm's procedure and by the stopping rule. text, where: the claim in words,
    and its place in the paper.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    first: str
    second: str
    metric: str
    better: Literal["smaller", "larger"] = "smaller"
    primary: bool = False
    text: str = ""
    where: str = ""

    @property
    def words(self) -> str:
        """The claim, or what is tested."""
        return self.text or f"{self.metric}: {self.first} {self.better} than {self.second}"


@dataclass(frozen=True)
class Pairs:
    """One metric of both arms, seed by seed, after training and at step 0."""

    first: Sequence[float]
    second: Sequence[float]
    first_untrained: Sequence[float]
    second_untrained: Sequence[float]

    def trained(self) -> list[float]:
        """Differences, first - second."""
        return [a - b for a, b in zip(self.first, self.second, strict=True)]

    def untrained(self) -> list[float]:
        """The same at step 0."""
        return [a - b for a, b in zip(self.first_untrained, self.second_untrained, strict=True)]

    def learned(self) -> list[float]:
        """What training added to the difference."""
        return [t - u for t, u in zip(self.trained(), self.untrained(), strict=True)]


@dataclass(frozen=True)
class Judged:
    """A contrast and what the seeds say. Differences are first - second, with their intervals.

    p, p_equivalent: of the two tests, after Holm in primary contrasts. needed: seeds that decide
    an undecided contrast with a margin, whatever the difference is.
    """

    contrast: Contrast
    seeds: int
    means: tuple[float, float]
    difference: Interval
    untrained: Interval
    sd: float
    p: float
    p_equivalent: float | None
    verdict: Verdict
    needed: int | None


def judge(
    contrasts: Sequence[Contrast],
    pairs: Sequence[Pairs],
    *,
    alpha: float,
    margins: Mapping[str, float],
) -> list[Judged]:
    """Verdicts, in the order of the contrasts. Fewer than two seeds leave one undecided."""
    primary = [i for i, contrast in enumerate(contrasts) if contrast.primary]
    allowed = [margins.get(contrast.metric) for contrast in contrasts]
    p = [_p_better(pair) for pair in pairs]
    same = [1.0 if m is None else _p_inside(g, m) for g, m in zip(pairs, allowed, strict=True)]
    for values in (p, same):
        for i, adjusted in zip(primary, holm([values[i] for i in primary]), strict=True):
            values[i] = adjusted
    found = []
    for contrast, pair, margin, one, two in zip(contrasts, pairs, allowed, p, same, strict=True):
        gaps = pair.trained()
        difference = interval(gaps, alpha)
        sd = statistics.stdev(gaps) if len(gaps) > 1 else math.nan
        verdict: Verdict = "undecided"
        if one <= alpha:
            good = (difference.mean > 0) == (contrast.better == "larger")
            verdict = "better" if good else "worse"
        elif two <= alpha:
            verdict = "equivalent"
        each = alpha / len(primary) if contrast.primary else alpha
        open_ = verdict == "undecided" and margin is not None and len(gaps) > 1
        found.append(
            Judged(
                contrast,
                len(gaps),
                (_mean(pair.first), _mean(pair.second)),
                difference,
                interval(pair.untrained(), alpha),
                sd,
                one,
                None if margin is None else two,
                verdict,
                seeds_needed(sd, margin, each) if open_ and margin is not None else None,
            )
        )
    return found


def interval(values: Sequence[float], alpha: float = 0.05) -> Interval:
    """Mean and its 1 - alpha interval by Student's t; infinite for one value, NaN for none."""
    from scipy.stats import t

    mean = _mean(values)
    if len(values) < 2:
        return Interval(mean, mean - math.inf, mean + math.inf)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(t.ppf(1 - alpha / 2, len(values) - 1)) * error
    return Interval(mean, mean - half, mean + half)


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p of Holm (1979): rejecting those <= alpha keeps the family's error at alpha."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    adjusted, floor = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        floor = max(floor, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = floor
    return adjusted


def seeds_needed(sd: float, margin: float, alpha: float, most: int = 100_000) -> int | None:
    """Seeds whose interval is at most as wide as the margin; None for more than ``most``.

    A half-width of half the margin always decides: either it leaves out 0, or the whole interval
    lies inside the margin.
    """
    from scipy.stats import t

    counts = np.arange(2, most + 1)
    half = t.ppf(1 - alpha / 2, counts - 1) * sd / np.sqrt(counts)
    enough = counts[half <= margin / 2]
    return int(enough[0]) if len(enough) else None


def detectable(sd: float, seeds: int, alpha: float, power: float = 0.8) -> float:
    """Smallest difference that a paired t test of level alpha finds, on its side, so often."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    cut, freedom = t.ppf(1 - alpha / 2, seeds - 1), seeds - 1

    def missing(shift: float) -> float:
        return float(nct.sf(cut, freedom, shift)) - power

    most = 1.0
    while missing(most) < 0:
        most *= 1.25
    return float(brentq(missing, 0.0, most)) * sd / math.sqrt(seeds)


def _p_better(pair: Pairs) -> float:
    """Two-sided p of a difference that is there and that training made; 1 where they disagree."""
    trained, learned = pair.trained(), pair.learned()
    if _mean(trained) * _mean(learned) <= 0:
        return 1.0
    return max(_p(trained), _p(learned))


def _p_inside(pair: Pairs, margin: float) -> float:
    """p of the two one-sided tests that the difference lies inside the margin (Schuirmann)."""
    gaps = pair.trained()
    sides = [[margin - gap for gap in gaps], [margin + gap for gap in gaps]]
    return max(_p(side) / 2 if _mean(side) > 0 else 1 - _p(side) / 2 for side in sides)


def _p(values: Sequence[float]) -> float:
    """Two-sided p of a mean of 0; 1 for fewer than two values."""
    from scipy.stats import t

    if len(values) < 2:
        return 1.0
    mean, error = _mean(values), statistics.stdev(values) / math.sqrt(len(values))
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * t.sf(abs(mean) / error, len(values) - 1))


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
