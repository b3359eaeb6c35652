"""Intervals of few repeats against scipy's."""

import math

import numpy as np
import pytest
from scipy import stats

from l2r.stats.chance import DRAWS, summary
from l2r.stats.statistics import mean_interval


@pytest.mark.parametrize("count", [*range(2, 33), 60, 200])
def test_the_interval_of_a_mean_is_students(count):
    """The table has four decimals; beyond it the second term of the expansion is left out."""
    values = np.random.default_rng(count).normal(3, 2, count)
    found = mean_interval(values.tolist())
    low, high = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    freedom, z = count - 1, stats.norm.ppf(0.975)
    beyond = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    slack = (5e-5 if freedom <= 30 else 1.1 * beyond) * stats.sem(values)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(low, abs=slack)
    assert found.high == pytest.approx(high, abs=slack)
    assert found.half == pytest.approx((high - low) / 2, abs=slack)


def test_one_value_has_no_width_and_none_is_refused():
    assert mean_interval([2.5]) == (2.5, 2.5, 2.5)
    with pytest.raises(ValueError, match="at least 1 value; got 0"):
        mean_interval([])


def test_the_ends_of_the_draws_by_chance_hold_95_percent():
    """One more draw has any rank among them with the same probability."""
    assert (DRAWS - 1) / (DRAWS + 1) == 0.95
    found = summary([3.0, 1.0, 2.0, 6.0])
    assert found == (3.0, 1.0, 6.0) and found.low <= found.mean <= found.high
    assert not math.isnan(found.half)
