"""95% intervals: of a mean of a few repeats, of a share of trials, of a ratio of sums."""

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
    """A mean and its 95% interval; the ends are the mean itself for a single value, and NaN where
    a value is not finite."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of its width."""
        return self.high - self.mean


class Ratio(NamedTuple):
    """A ratio of sums, its standard error and 95% interval; NaN where one unit leaves them open, or
    a number of some unit is not finite."""

    value: float
    error: float
    low: float
    high: float


def mean_or_nan(values: Sequence[float]) -> float:
    """Mean, NaN of no values."""
    return _total(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; NaN of fewer than two values, or of one that is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values)


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean of repeats and its 95% interval. Raises ValueError for no values."""
    if not values:
        raise ValueError("an interval needs at least 1 value; got 0")
    mean = mean_or_nan(values)
    if len(values) == 1:
        return Interval(mean, mean, mean)
    half = _quantile(len(values) - 1) * deviation(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def share_interval(hits: float, trials: float) -> Interval:
    """Share of trials that were hits, with Wilson's interval, which is right at 0 and 1 too.

    Raises ValueError for no trials.
    """
    if trials <= 0:
        raise ValueError(f"a share needs at least 1 trial; got {trials}")
    share, z = hits / trials, statistics.NormalDist().inv_cdf(0.975)
    center = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    variance = share * (1 - share) / trials + z * z / (4 * trials * trials)
    half = z * math.sqrt(variance) / (1 + z * z / trials)
    # at a border that end is the share itself, but for rounding
    return Interval(share, max(0.0, center - half), min(1.0, center + half))


def mean_share(parts: Sequence[tuple[int, int]]) -> Interval:
    """Mean of the shares of independent (hits, trials), with its interval.

    It is that of one share of as many trials as would leave the mean its variance, for which a hit
    and a miss are added to every part: one without hits, or without misses, is not certain.
    Raises ValueError for no part or one without trials.
    """
    if not parts or any(trials < 1 for _, trials in parts):
        raise ValueError(f"a mean needs shares of at least 1 trial; got {list(parts)}")
    shares = [(hits + 1) / (trials + 2) for hits, trials in parts]
    squares = zip(shares, parts, strict=True)
    variance = sum(p * (1 - p) / trials for p, (_, trials) in squares) / len(parts) ** 2
    likely = statistics.fmean(shares)
    trials = likely * (1 - likely) / variance
    return share_interval(statistics.fmean(h / n for h, n in parts) * trials, trials)


def ratio_of_sums(tops: Sequence[float], bottoms: Sequence[float]) -> Ratio:
    """Sum of ``tops`` by sum of ``bottoms``, two numbers of every unit that was drawn.

    The error is that of the mean of what the ratio leaves of every unit, ``top - ratio * bottom``,
    so large units count for more; the interval is Student's.
    Raises ValueError where the bottoms have no sum.
    """
    total, count = math.fsum(bottoms), len(bottoms)
    if not total > 0:
        raise ValueError(f"a ratio needs a sum above 0 below it; got {total} of {count} units")
    value = _total(tops) / total
    if count == 1:
        return Ratio(value, math.nan, math.nan, math.nan)
    rest = [top - value * bottom for top, bottom in zip(tops, bottoms, strict=True)]
    error = deviation(rest) * math.sqrt(count) / total
    half = _quantile(count - 1) * error
    return Ratio(value, error, value - half, value + half)


def _total(values: Sequence[float]) -> float:
    """Sum, of which fsum raises an error where infinities cancel."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _quantile(freedom: int) -> float:
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom)  # first term of the expansion in 1 / freedom
