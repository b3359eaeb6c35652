"""Time steps in turns, so that a busy machine slows all of them alike; on torch.utils.benchmark."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils.benchmark import Timer

from l2r.kernels.native.build import library
from l2r.machine import describe_machine
from l2r.report.tables import Table

Step = Callable[[int], object]
_TIMES = ("median_us", "median_ms", "step_ms", "latency_ms", "peak_mib")
_TERMINAL_COLUMNS = (
    "contender", "shape", "size", "phase", "mode", "axis", "value", "tokens", *_TIMES, "ratio",
)  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """Seconds of one step in every turn; ``steps`` are those that all turns took together."""

    turns: tuple[float, ...]
    steps: int = 0

    @property
    def median(self) -> float:
        """Median over the turns."""
        return statistics.median(self.turns)

    def columns(self, unit: str) -> dict[str, float]:
        """Median, lowest and highest as fields of a record, in ``ms`` or ``us``."""
        scale = {"ms": 1e3, "us": 1e6}[unit]
        values = {"median": self.median, "low": min(self.turns), "high": max(self.turns)}
        return {f"{name}_{unit}": scale * value for name, value in values.items()}

    def over(self, base: "Timing") -> dict[str, float]:
        """Median and quartiles of the ratios to ``base`` in the same turn, as fields of a record.

        Both need the same number of turns, at least two.
        """
        each = [own / other for own, other in zip(self.turns, base.turns, strict=True)]
        low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
        return {"ratio": middle, "ratio_low": low, "ratio_high": high}


def measure(
    steps: Mapping[str, Step], *, seconds: float, rounds: int = 9, clock: str = "wall"
) -> dict[str, Timing]:
    """Time every step in ``rounds`` alternating turns, ``seconds`` for all of it.

    At least three turns, and no more once twice that time is over. A step is called with a running
    number, by which it can rotate its inputs. Before the turns each runs untimed for half of its
    share: compilation, caches, and memory that a virtual machine is given on first use (60 against
    11 ms for the first 15 steps of a router, seen here). ``clock="cpu"`` counts the processor time
    of the process, which is steady on a busy machine and meant for one thread; ``"wall"`` waits
    for the GPU where there is one.
    """
    options: dict[str, Any] = {"num_threads": torch.get_num_threads()}
    if clock == "cpu":
        options["timer"] = time.process_time
    share = seconds / len(steps)
    timers = {
        name: Timer("step(next(numbers))", globals={"step": step, "numbers": count()}, **options)
        for name, step in steps.items()
    }
    for step in steps.values():
        _warm(step, share / 2)
    turns: dict[str, list[float]] = {name: [] for name in steps}
    taken = dict.fromkeys(steps, 0)
    start = time.perf_counter()
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() - start > 2 * seconds:
            break  # a loaded machine, or steps longer than their share
        names = list(timers)
        for name in names if turn % 2 == 0 else reversed(names):
            timed = timers[name].blocked_autorange(min_run_time=share / rounds)
            turns[name].append(timed.median)
            taken[name] += timed.number_per_run * len(timed.raw_times)
    return {name: Timing(tuple(values), taken[name]) for name, values in turns.items()}


def _warm(step: Step, seconds: float) -> None:
    start, number = time.perf_counter(), 0
    while number < 2 or time.perf_counter() - start < seconds:
        step(number)
        number += 1


def environment() -> dict[str, Any]:
    """Describe the machine in one level.

    ``cpu_routers``: what computes routers on the CPU, C++ or, where it could not be built, torch.
    """
    machine = describe_machine()
    gpus = machine.pop("gpus")
    routers = "C++" if library() else "torch"
    return {
        **machine.pop("packages"),
        **machine,
        "gpu": ", ".join(gpus) or None,
        "cpu_routers": routers,
    }


def bench_table(
    name: str, note: str, records: Sequence[Mapping[str, Any]], *, ranges: bool = True
) -> Table:
    """Make a table of all records, the machine in its caption; ``ranges``: quartiles of ratios."""
    columns = tuple(records[0]) if records else ("contender",)
    shown = [_with_range(record) if ranges else record for record in records]
    rows = tuple(tuple(record[column] for column in columns) for record in shown)
    place = ", ".join(f"{key} {value}" for key, value in environment().items() if value)
    few = tuple(column for column in columns if column in _TERMINAL_COLUMNS)
    caption = f"{note} {place}".strip()
    return Table(f"Benchmark: {name}", columns, rows, caption=caption, digits=3, few=few)


def _with_range(record: Mapping[str, Any]) -> dict[str, Any]:
    if record.get("ratio_low") is None:
        return dict(record)
    low, high = record["ratio_low"], record["ratio_high"]
    return {**record, "ratio": f"{record['ratio']:.2f} ({low:.2f}-{high:.2f})"}
