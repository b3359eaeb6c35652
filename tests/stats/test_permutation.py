"""The permutation test against its definition, and its error where nothing differs."""

import math
import random
from itertools import combinations

import pytest

from l2r.stats.permutation import larger_by_chance


def by_definition(before, after):
    pooled = [*before, *after]
    splits = list(combinations(pooled, len(after)))
    return sum(sum(split) >= sum(after) - 1e-9 for split in splits) / len(splits)


@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (5, 4), (2, 7)])
def test_it_is_the_share_of_splits_that_reach_the_difference(sizes):
    draw = random.Random(0)
    before, after = ([draw.gauss(0, 1) for _ in range(size)] for size in sizes)
    assert larger_by_chance(before, after) == pytest.approx(by_definition(before, after))


def test_ties_count_and_the_extreme_split_gives_the_least_p():
    assert larger_by_chance([1.0, 1.0], [1.0, 1.0]) == 1
    assert larger_by_chance([0.1, 0.2, 0.3], [1.1, 1.2, 1.3]) == pytest.approx(1 / 20)
    assert larger_by_chance([1.1, 1.2, 1.3], [0.1, 0.2, 0.3]) == 1


def test_many_splits_are_drawn_and_p_is_never_zero():
    """C(24, 12) is above the limit; the least p that draws can give is one of them."""
    before, after = list(range(12)), list(range(100, 112))
    assert 0 < larger_by_chance(before, after) <= 2 / 50_001
    exact = larger_by_chance(list(range(8)), list(range(2, 10)))  # C(16, 8): all
    drawn = larger_by_chance(list(range(8)) * 2, list(range(2, 10)) * 2)
    assert drawn < exact


def test_under_no_difference_it_errs_as_often_as_it_says():
    draw = random.Random(1)
    p = [
        larger_by_chance(*[[draw.gauss(0, 1) for _ in range(5)] for _ in range(2)])
        for _ in range(400)
    ]
    share = sum(value <= 0.05 for value in p) / len(p)
    assert share < 0.05 + 4 * (0.05 * 0.95 / 400) ** 0.5


def test_empty_samples_are_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        larger_by_chance([], [1.0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_samples_that_are_not_finite_are_not_tested(side, value):
    samples = [[1.0, 2.0], [5.0, 6.0]]
    samples[side][0] = value
    assert math.isnan(larger_by_chance(*samples))
