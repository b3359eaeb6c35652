"""Workers that end before their time."""

import os
import signal
from concurrent.futures.process import BrokenProcessPool

from l2r_lab.training.data import workers
from tests.processes import Running


def dies_as_it_looks(tokenizer, out, split, reports, stop):
    """Start of a worker that is killed while it reads whether to stop."""
    lock = getattr(stop, "_cond", None)
    if lock is not None:
        lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def tokenize(folder):
    workers._start_worker = dies_as_it_looks
    task = workers.ShardTask("a", "a", "a.txt", "a.txt")
    options = {"tokenizer": None, "split": None, "workers": 1, "on_progress": print}
    try:
        list(workers.tokenize_shards([task], folder, **options))
    except BrokenProcessPool:
        print("broken")


def test_a_worker_that_is_killed_leaves_no_lock_to_wait_for(tmp_path):
    assert Running(tmp_path / "output", tokenize, tmp_path).succeed() == "broken\n"
