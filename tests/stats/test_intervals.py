"""Intervals of few repeats and of shares against scipy's; of samples that are not finite none."""

import math

import numpy as np
import pytest
from scipy import stats

from l2r.stats.chance import DRAWS, summary
from l2r.stats.intervals import (
    deviation,
    mean_interval,
    mean_share,
    ratio_of_sums,
    share_interval,
)
from l2r_lab.stats.paired_t import estimate


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


@pytest.mark.parametrize(
    ("hits", "count"), [(0, 10), (10, 10), (3, 10), (1, 1), (0, 1), (417, 1838)]
)
def test_the_interval_of_a_share_is_wilsons(hits, count):
    share = share_interval(hits, count)
    theirs = stats.binomtest(hits, count).proportion_ci(0.95, "wilson")
    assert share == pytest.approx((hits / count, theirs.low, theirs.high), abs=1e-12)
    assert 0 <= share.low < share.high <= 1


def test_no_trials_have_no_share():
    with pytest.raises(ValueError, match="at least 1"):
        share_interval(0, 0)
    for parts in ([], [(1, 2), (0, 0)]):
        with pytest.raises(ValueError, match="at least 1"):
            mean_share(parts)


def test_the_mean_of_one_share_is_that_share():
    for part in ((0, 10), (10, 10), (3, 7)):
        assert mean_share([part]) == pytest.approx(share_interval(*part))


def test_shares_of_none_and_of_all_have_a_mean_that_is_not_certain():
    mean = mean_share([(0, 10), (10, 10)])
    assert mean.mean == 0.5 and mean.low < 0.45 and mean.high > 0.55


def test_the_mean_of_shares_covers_at_the_border_too():
    """Eight tasks of 60 documents, easy and hard, where a normal interval would be too short."""
    rng, rounds = np.random.default_rng(0), 1000
    for truths in (np.full(8, 0.01), np.full(8, 0.98), np.linspace(0.02, 0.9, 8)):
        covered = 0
        for _ in range(rounds):
            mean = mean_share([(int(hits), 60) for hits in rng.binomial(60, truths)])
            covered += mean.low <= truths.mean() <= mean.high
        assert covered / rounds > 0.95 - 4 * math.sqrt(0.95 * 0.05 / rounds)


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf]])
def test_a_sample_that_is_not_finite_has_no_deviation(bad):
    values = [1.0, *bad, 3.0]
    mean = sum(values) / len(values)
    found, ratio = mean_interval(values), ratio_of_sums(values, [2.0] * len(values))
    assert math.isnan(deviation(values)) and math.isnan(estimate(values).sd)
    assert found == pytest.approx((mean, math.nan, math.nan), nan_ok=True)
    assert estimate(values).mean == pytest.approx(mean, nan_ok=True)
    assert ratio == pytest.approx((mean / 2, *[math.nan] * 3), nan_ok=True)


def test_a_deviation_is_that_of_a_sample():
    values = np.random.default_rng(0).normal(3, 2, 9)
    assert deviation(values.tolist()) == pytest.approx(values.std(ddof=1))
