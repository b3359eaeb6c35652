"""95% intervals of a mean from a few repeats (Student's t)."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom; beyond, see _quantile.
_T_975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


class Interval(NamedTuple):
    """A mean and its 95% interval; the ends are the mean itself for a single value."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of its width."""
        return self.high - self.mean


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of repeats and its 95% interval. Raises ValueError for no values."""
    if not values:
        raise ValueError("an interval needs at least 1 value; got 0")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, mean, mean)
    half = _quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def _quantile(freedom: int) -> float:
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom)  # first term of the expansion in 1 / freedom
