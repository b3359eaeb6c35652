"""The helpers that start processes say what went wrong in them."""

import multiprocessing
import os
import time

import pytest
from torch.distributed.rendezvous import rendezvous

from tests.processes import Running, on_ranks, on_two_ranks


def one_fails():
    """Rank 1 ends with an error while rank 0 waits for a key that it never sets."""
    store = next(rendezvous("env://"))[0]
    if os.environ["RANK"] == "1":
        store.get("rank 0 is here")
        raise ValueError("out of luck")
    store.set("rank 0 is here", "")
    store.get("never set")


def test_a_process_that_is_stopped_before_it_starts_has_said_nothing(tmp_path):
    process = Running(tmp_path, time.sleep, 60)
    process.process.kill()
    process.process.join()
    assert process.out == process.err == ""


def test_a_rank_that_fails_ends_the_others_and_is_the_one_that_is_shown(tmp_path):
    with pytest.raises(AssertionError, match="out of luck") as failure:
        on_ranks(2, tmp_path / "output", Running, one_fails)
    assert "in one_fails" in str(failure.value).split("rank 1:")[0]  # where rank 0 stood


def never_ends(rank):
    if rank == 1:
        time.sleep(3600)


def test_two_ranks_that_wait_for_one_another_are_ended(tmp_path):
    before = set(multiprocessing.active_children())
    with pytest.raises(TimeoutError, match=r"within 0\.5 s"):
        on_two_ranks(never_ends, tmp_path, within=0.5)
    assert set(multiprocessing.active_children()) <= before
