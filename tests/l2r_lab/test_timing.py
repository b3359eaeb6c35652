"""Steps are timed in turns, by one clock, and a result names what computed it."""

import itertools
import statistics

import pytest
import torch

from l2r_lab import timing
from l2r_lab.timing import Timing, bench_table, environment, measure


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_contenders_take_turns_and_the_slow_one_is_slower(clock: str) -> None:
    calls, numbers = [], []

    def step(name: str, size: int):  # type: ignore[no-untyped-def]
        def run(number: int) -> None:
            calls.append(name)
            numbers.append(number)
            torch.zeros(size, size) @ torch.zeros(size, size)

        return run

    before = torch.get_num_threads()
    steps = {"small": step("small", 8), "large": step("large", 300)}
    times = measure(steps, seconds=0.2, rounds=5, clock=clock)
    assert times["small"].median < times["large"].median
    assert all(3 <= len(time.turns) <= 5 for time in times.values())
    assert times["small"].median == statistics.median(times["small"].turns)
    turns = [name for name, other in itertools.pairwise(calls) if name != other]
    assert len(turns) >= 3 and max(numbers) > 3  # running numbers, to rotate inputs by
    assert torch.get_num_threads() == before


def test_a_ratio_is_of_the_same_turn_with_quartiles() -> None:
    own, base = Timing((1.0, 3.0, 20.0)), Timing((1.0, 2.0, 10.0))
    assert own.over(base) == {"ratio": 1.5, "ratio_low": 1.25, "ratio_high": 1.75}
    assert own.columns("ms") == {"median_ms": 3e3, "low_ms": 1e3, "high_ms": 2e4}


def test_a_result_names_what_computed_the_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels, name in ((None, "torch"), (object(), "C++")):
        monkeypatch.setattr(timing, "library", lambda kernels=kernels: kernels)
        assert environment()["cpu_routers"] == name


def test_a_table_shows_the_range_of_a_ratio() -> None:
    ratio = {"ratio": 1.5, "ratio_low": 1.25, "ratio_high": 1.75}
    table = bench_table("router", "Note.", [{"contender": "linear", **ratio}])
    assert table.rows == (("linear", "1.50 (1.25-1.75)", 1.25, 1.75),)
    assert table.caption.startswith("Note. l2r-moe ") and table.title == "Benchmark: router"
    assert bench_table("router", "", []).rows == ()
