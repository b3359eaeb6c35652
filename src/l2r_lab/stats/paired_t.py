"""Estimates of paired differences by Student's t, Holm's procedure, and the seeds of a margin."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from l2r.stats.intervals import Interval, deviation, mean_or_nan


@dataclass(frozen=True)
class Estimate:
    """A mean of ``count`` values, their deviation and its degrees of freedom."""

    mean: float
    count: int
    sd: float
    freedom: int

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.sd / math.sqrt(self.count)

    def interval(self, alpha: float = 0.05) -> Interval:
        """1 - alpha interval by Student's t; infinite for one value."""
        from scipy.stats import t

        wide = self.error * float(t.ppf(1 - alpha / 2, self.freedom)) if self.freedom else math.inf
        return Interval(self.mean, self.mean - wide, self.mean + wide)

    def p_above(self, value: float) -> float:
        """One-sided p of a mean that is no larger than ``value``."""
        from scipy.stats import t

        if not self.freedom:
            return 1.0
        if self.error == 0:
            return 0.0 if self.mean > value else 1.0
        return float(t.sf((self.mean - value) / self.error, self.freedom))


def estimate(values: Sequence[float], first: int | None = None) -> Estimate:
    """Mean of all values; deviation of the ``first``, or of all."""
    base = values[:first]
    return Estimate(mean_or_nan(values), len(values), deviation(base), max(0, len(base) - 1))


def holm(p: Sequence[float]) -> list[float]:
    """Return adjusted p of Holm (1979): rejecting those <= alpha keeps the family's error at alpha.

    NaN, of a test that could not be made, counts as 1: it rejects nothing, and stays in the family.
    """
    p = [1.0 if math.isnan(value) else value for value in p]
    order = sorted(range(len(p)), key=lambda i: p[i])
    adjusted, floor = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        floor = max(floor, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = floor
    return adjusted


def seeds_needed(
    gaps: Estimate, margin: float, alpha: float, *, fixed: bool = False, most: int = 100_000
) -> int | None:
    """Seeds whose interval is at most as wide as the margin; None for more than ``most``.

    A half-width of half the margin always decides: either it leaves out 0, or the whole interval
    lies inside the margin. ``fixed``: the degrees of freedom stay those of the estimate.
    """
    from scipy.stats import t

    def enough(count: int) -> bool:
        cut = t.ppf(1 - alpha / 2, gaps.freedom if fixed else count - 1)
        return bool(cut * gaps.sd / math.sqrt(count) <= margin / 2)

    least = 2 + bisect_left(range(2, most + 1), True, key=enough)
    return least if least <= most else None


def detectable(
    sd: float, seeds: int, alpha: float, power: float = 0.8, first: int | None = None
) -> float:
    """Smallest difference that a paired t test of level alpha finds, on its side, so often."""
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    freedom = min(first or seeds, seeds) - 1
    cut = t.ppf(1 - alpha / 2, freedom)

    def missing(shift: float) -> float:
        return float(nct.sf(cut, freedom, shift)) - power

    most = 1.0
    while missing(most) < 0:
        most *= 1.25
    return float(brentq(missing, 0.0, most)) * sd / math.sqrt(seeds)
