"""Contrasts of a study: paired differences over seeds, tested, and what each comes to.

A contrast that is *better* or *worse* passed a test of the difference and, where the metric asks
for it, one of what training added to it since step 0. *Equivalent* is two one-sided tests inside
the margin. Holm's procedure holds the error of each kind over all primary contrasts.

A contrast that is none of these has no verdict: ``Judged.says`` then gives what its interval
excludes.

In closed plans, whose number of seeds followed from what the first of them showed, the deviation is
theirs alone, with their degrees of freedom (Stein, 1945): it says nothing about the mean, so that
the error stays what it should be. With the deviation of all seeds it rose from 5% to 9% (3 seeds,
then up to 10).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from l2r.stats.intervals import Interval, mean_or_nan
from l2r_lab.stats.paired_t import Estimate, estimate, holm, seeds_needed

_ROUNDING = 1e-6  # of a measure: sums in fp32, stored with seven digits
NOT_FINITE = "a value is not finite"
SEEDS_MISSING = "seeds missing"
NO_VERDICT = "no verdict"
Verdict = Literal["better", "worse", "equivalent", "no verdict", "interval"]


@dataclass(frozen=True)
class Contrast:
    """``first`` is better than ``second`` where its ``metric`` is smaller (or larger).

    since: two arms, of whose difference the change to that of first and second is taken; in the
    place of each arm's value is then its change since its own. primary: counted by Holm's
    procedure. text, where: the claim in words,
    and its place in the paper.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    first: str
    second: str
    metric: str
    better: Literal["smaller", "larger"] = "smaller"
    since: tuple[str, str] | None = None
    primary: bool = False
    text: str = ""
    where: str = ""


@dataclass(frozen=True)
class Pairs:
    """One metric of both arms, seed by seed, after training and at step 0.

    No values at step 0: it has none there, and any difference is training's.
    """

    first: Sequence[float]
    second: Sequence[float]
    first_untrained: Sequence[float] = ()
    second_untrained: Sequence[float] = ()

    def are_finite(self) -> bool:
        """Tell whether no value is NaN or infinite."""
        sides = (self.first, self.second, self.first_untrained, self.second_untrained)
        return all(math.isfinite(value) for side in sides for value in side)

    def trained(self) -> list[float]:
        """Differences, first - second."""
        return [a - b for a, b in zip(self.first, self.second, strict=True)]

    def untrained(self) -> list[float]:
        """Differences at step 0, first - second."""
        return [a - b for a, b in zip(self.first_untrained, self.second_untrained, strict=True)]

    def learned(self) -> list[float]:
        """Subtract the differences at step 0; 0 if the change is rounding, which has signs."""
        if not self.first_untrained:
            return self.trained()
        scale = max((abs(x) for side in (self.first, self.second) for x in side), default=0.0)
        changes = [t - u for t, u in zip(self.trained(), self.untrained(), strict=True)]
        return [c if abs(c) > _ROUNDING * max(1.0, scale) else 0.0 for c in changes]


@dataclass(frozen=True)
class Judged:
    """A contrast and what the seeds say. Differences are first - second, with their intervals.

    verdict: *interval* where none is asked for. sd: of the paired differences. p, p_equivalent: of
    the two tests, after Holm in primary contrasts. needed: seeds that decide a contrast without a
    verdict that has a margin, whatever it is. plain, p_plain: interval and p of the ordinary paired
    t over all seeds, where the number of seeds followed from the first of them; None elsewhere.
    reason: why the contrast has no verdict, where it is not that its interval holds 0.
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
    plain: Interval | None = None
    p_plain: float | None = None
    reason: str = ""

    def says(self, digits: str = ".4f") -> str:
        """Verdict in words: the side of what is equivalent, or what the interval excludes."""
        if self.verdict == "equivalent":
            return f"equivalent, {self._side()}"
        if self.verdict != NO_VERDICT or self.reason in (NOT_FINITE, SEEDS_MISSING):
            return self.verdict
        return excluded(self.difference, self.contrast.better, digits)

    def _side(self) -> str:
        """Side of 0 on which the interval of the difference lies."""
        low, high = self.difference.low, self.difference.high
        if low <= 0 <= high:
            return "0 inside its interval"
        return (
            "on the better side"
            if (low > 0) == (self.contrast.better == "larger")
            else ("on the worse side")
        )


def excluded(difference: Interval, better: str, digits: str = ".4f") -> str:
    """Gains and losses that the interval of a difference excludes, in its unit.

    A gain is a difference toward ``better``, smaller or larger.
    """
    ends = (-difference.low, difference.high)
    gain, loss = ends if better == "smaller" else ends[::-1]
    if not (math.isfinite(gain) and math.isfinite(loss)):
        return NO_VERDICT
    sides = (("gain", gain), ("loss", loss))
    return ", ".join(f"no {s} above {v:{digits}}" if v > 0 else f"no {s}" for s, v in sides)


def judge(
    contrasts: Sequence[Contrast],
    pairs: Sequence[Pairs],
    *,
    alpha: float,
    margins: Mapping[str, float],
    least: int = 2,
    first: int | None = None,
    by_training: Collection[str] | None = None,
    secondary: bool = True,
) -> list[Judged]:
    """Verdicts, in the order of the contrasts. One has none with fewer than ``least`` seeds, or
    where a value is NaN or infinite.

    ``first``: seeds from whose deviation the number of all followed, if it did. ``by_training``:
    metrics whose difference training must have added; None for all. ``secondary``: whether
    contrasts that are not primary have a verdict, and not an interval alone.
    """
    primary = [i for i, contrast in enumerate(contrasts) if contrast.primary]
    allowed = [margins.get(contrast.metric) for contrast in contrasts]
    using = [first if contrast.primary else None for contrast in contrasts]
    added = [by_training is None or contrast.metric in by_training for contrast in contrasts]
    p = [_p_better(*values) for values in zip(pairs, using, added, strict=True)]
    same = [_p_inside(pair, m, n) for pair, m, n in zip(pairs, allowed, using, strict=True)]
    plain = [_p_better(pair, None, rule) for pair, rule in zip(pairs, added, strict=True)]
    unadjusted = list(p)
    for values in (p, same, plain):
        for i, adjusted in zip(primary, holm([values[i] for i in primary]), strict=True):
            values[i] = adjusted
    results = []
    for i, (contrast, pair, margin) in enumerate(zip(contrasts, pairs, allowed, strict=True)):
        gaps = estimate(pair.trained(), using[i])
        verdict: Verdict = "no verdict"
        enough = gaps.count >= least
        if enough and p[i] <= alpha:
            good = (gaps.mean > 0) == (contrast.better == "larger")
            verdict = "better" if good else "worse"
        elif enough and same[i] <= alpha:
            verdict = "equivalent"
        if not secondary and not contrast.primary:
            verdict = "interval"
        needed = None
        reason = ""
        if verdict == NO_VERDICT:
            reason = _reason(pair, gaps, unadjusted[i], alpha, enough=enough)
        is_open = enough and verdict == NO_VERDICT and reason != NOT_FINITE
        if is_open and margin is not None and gaps.freedom:
            each = alpha / len(primary) if contrast.primary else alpha
            needed = seeds_needed(gaps, margin, each, fixed=using[i] is not None)
        results.append(
            Judged(
                contrast,
                gaps.count,
                (mean_or_nan(pair.first), mean_or_nan(pair.second)),
                gaps.interval(alpha),
                estimate(pair.untrained(), using[i]).interval(alpha),
                gaps.sd,
                p[i],
                None if margin is None else same[i],
                verdict,
                needed,
                *_of_all_seeds(pair, plain[i], alpha, using[i]),
                reason=reason,
            )
        )
    return results


def _of_all_seeds(
    pair: Pairs, p: float, alpha: float, first: int | None
) -> tuple[Interval | None, float | None]:
    """Interval and p of the plain paired t, where verdicts use the ``first`` seeds' deviation."""
    if first is None:
        return None, None
    return estimate(pair.trained()).interval(alpha), p


def _reason(pair: Pairs, gaps: Estimate, p: float, alpha: float, *, enough: bool) -> str:
    """Reason why a contrast has no verdict, but that its interval holds 0: then empty.

    ``p`` is before Holm's procedure; ``enough``: whether the plan's least seeds are complete.
    """
    if not pair.are_finite():
        return NOT_FINITE
    if not enough:
        return SEEDS_MISSING
    interval = gaps.interval(alpha)
    if not (interval.low > 0 or interval.high < 0):
        return ""
    if p > alpha:
        return "there before training"
    return "not after Holm" if gaps.freedom else ""


def _p_better(pair: Pairs, first: int | None, by_training: bool) -> float:
    """Two-sided p of a difference that is there and, if asked for, that training made; 1 where
    these disagree, or a value is not finite."""
    if not pair.are_finite():
        return 1.0
    trained = estimate(pair.trained(), first)
    learned = estimate(pair.learned(), first) if by_training else trained
    if not trained.mean * learned.mean > 0:
        return 1.0
    ps = [min(e.p_above(0), _mirrored(e).p_above(0)) for e in (trained, learned)]
    return min(1.0, 2 * max(ps))


def _p_inside(pair: Pairs, margin: float | None, first: int | None) -> float:
    """p of the two one-sided tests that the difference lies inside the margin (Schuirmann)."""
    gaps = estimate(pair.trained(), first)
    if margin is None or not pair.are_finite():
        return 1.0
    return max(gaps.p_above(-margin), _mirrored(gaps).p_above(-margin))


def _mirrored(gaps: Estimate) -> Estimate:
    return Estimate(-gaps.mean, gaps.count, gaps.sd, gaps.freedom)
