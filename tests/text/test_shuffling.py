"""The order of items: a permutation per epoch, the same for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2r.text.shuffling import batch_indices, epoch_order


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 200), seed=st.integers(0, 2**31), epoch=st.integers(0, 5))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    assert sorted(epoch_order(size, seed, epoch).tolist()) == list(range(size))


def test_epochs_and_seeds_differ_and_repeat_exactly():
    orders = [epoch_order(100, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    epoch_order.cache_clear()
    assert epoch_order(100, 0, 0).tolist() == orders[0]


def test_order_is_pinned_so_that_old_runs_resume_the_same():
    assert epoch_order(10, 2025, 0).tolist() == [5, 9, 6, 1, 8, 2, 3, 7, 4, 0]


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 40),
    rows=st.integers(1, 6),
    world=st.integers(1, 5),
    step=st.integers(0, 30),
)
def test_ranks_slices_join_to_the_global_batch(size, rows, world, step):
    batch = rows * world
    whole = batch_indices(size, step, batch, seed=1)
    parts = [
        batch_indices(size, step, batch, seed=1, rank=r, world_size=world) for r in range(world)
    ]
    assert np.array_equal(np.concatenate(parts), whole)


@settings(deadline=None, max_examples=40)
@given(size=st.integers(1, 40), batch=st.integers(1, 60))
def test_no_item_repeats_inside_an_epoch(size, batch):
    steps = -(-3 * size // batch)
    stream = np.concatenate([batch_indices(size, s, batch, seed=7) for s in range(steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


def test_position_means_the_same_for_every_batch_size():
    small = np.concatenate([batch_indices(17, s, 3, seed=5) for s in range(8)])
    assert np.array_equal(small, batch_indices(17, 0, 24, seed=5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 3, "world_size": 2}, "batch_size must be a positive multiple"),
        ({"batch_size": 0}, "batch_size must be a positive multiple"),
        ({"batch_size": 2, "rank": 1}, r"rank must be in \[0, 1\)"),
        ({"batch_size": 2, "step": -1}, "step must be >= 0; got -1"),
        ({"batch_size": 2, "seed": -1}, "seed and epoch must be >= 0"),
        ({"batch_size": 2, "size": 0}, "size must be between 1"),
    ],
)
def test_impossible_batches_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        batch_indices(**{"size": 4, "step": 0, "seed": 0, **arguments})
