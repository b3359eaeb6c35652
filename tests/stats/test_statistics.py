"""Intervals: of shares scipy's Wilson interval; of samples that are not finite none."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from l2r.stats.paired_t import estimate
from l2r.stats.statistics import (
    deviation,
    mean_interval,
    mean_share,
    ratio_of_sums,
    share_interval,
)


@pytest.mark.parametrize(
    ("hits", "count"), [(0, 10), (10, 10), (3, 10), (1, 1), (0, 1), (417, 1838)]
)
def test_the_interval_of_a_share_is_wilsons(hits, count):
    share = share_interval(hits, count)
    theirs = binomtest(hits, count).proportion_ci(0.95, "wilson")
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
