"""A permutation test of two samples: could the difference of their means be the order's?"""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np

_MOST = 50_000  # splits that are all gone through; of more, so many are drawn


def larger_by_chance(before: Sequence[float], after: Sequence[float]) -> float:
    """One-sided p that the mean of ``after`` is larger than that of ``before`` by chance.

    The share of all splits of the pooled values in which the second part's mean is at least as
    large; with more than 50,000 splits of as many drawn, the observed one among them. Raises
    ValueError for an empty sample; NaN where a value is not finite.
    """
    if not before or not after:
        raise ValueError(f"samples must not be empty; got {len(before)} and {len(after)} values")
    pooled = np.array([*before, *after])
    if not np.isfinite(pooled).all():
        return math.nan
    size = len(after)
    if math.comb(len(pooled), size) <= _MOST:
        chosen = np.array(list(combinations(range(len(pooled)), size)))
        sums, more = pooled[chosen].sum(axis=1), 0
    else:
        order = np.random.default_rng(0).random((_MOST, len(pooled))).argsort(axis=1)
        sums, more = pooled[order[:, :size]].sum(axis=1), 1
    rounding = 1e-9 * np.abs(pooled).sum()  # equal values summed in another order are equal
    reached = int((sums >= sum(after) - rounding).sum())
    return (reached + more) / (len(sums) + more)
