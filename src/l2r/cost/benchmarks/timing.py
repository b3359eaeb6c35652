"""Timing: contenders take turns, so that a busy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

Step = Callable[[int], object]


@dataclass(frozen=True)
class Timing:
    """Seconds of one step: median, lowest and highest over the rounds, and in every turn."""

    median: float
    low: float
    high: float
    turns: tuple[float, ...] = ()

    def columns(self, unit: str) -> dict[str, float]:
        """The three as fields of a record, in ``ms`` or ``us``."""
        scale = {"ms": 1e3, "us": 1e6}[unit]
        values = {"median": self.median, "low": self.low, "high": self.high}
        return {f"{name}_{unit}": scale * value for name, value in values.items()}

    def over(self, base: "Timing") -> dict[str, float]:
        """Median and quartiles of the ratios to ``base`` in the same turn, as fields of a record.

        Both need the same number of turns, at least two.
        """
        each = [own / other for own, other in zip(self.turns, base.turns, strict=True)]
        low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
        return {"ratio": middle, "ratio_low": low, "ratio_high": high}


def measure(
    contenders: Mapping[str, Step],
    *,
    device: str,
    seconds: float,
    rounds: int = 9,
    kind: str = "wall",
    on_turn: Callable[[int], None] = lambda turns: None,
) -> dict[str, Timing]:
    """Time every contender in ``rounds`` alternating turns, ``seconds`` for all of it.

    At least three turns, and no more once twice that time, by the same clock, is over. A step is
    called with a running number, by which it can rotate its inputs. Before, each runs untimed for
    half of its share: compilation, caches, and memory that a virtual machine is given on first use
    (60 against 11 ms for the first 15 steps of a router, seen here). ``kind="cpu"`` counts the
    processor time of the process instead of the clock on the wall: steady on a busy machine,
    meant for one thread. ``on_turn`` is given the number of finished turns, between them.
    """
    clock = _CLOCKS[device if device == "cuda" else kind]
    repeats = {}
    for name, step in contenders.items():
        _warm(step, seconds / len(contenders) / 2)
        once = max(min(clock(step, 1), clock(step, 1)), 1e-7)
        repeats[name] = max(1, int(seconds / len(contenders) / rounds / once))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    now = time.process_time if kind == "cpu" else time.perf_counter
    start = now()
    for turn in range(rounds):
        if turn >= 3 and now() - start > 2 * seconds:
            break  # a loaded machine, or steps longer than their share
        names = list(contenders)
        for name in names if turn % 2 == 0 else reversed(names):
            count = repeats[name]
            samples[name].append(clock(contenders[name], count) / count)
        on_turn(turn + 1)
    return {n: Timing(statistics.median(v), min(v), max(v), tuple(v)) for n, v in samples.items()}


def _warm(step: Step, seconds: float) -> None:
    start = time.perf_counter()
    number = 0
    while number < 2 or time.perf_counter() - start < seconds:
        step(number)
        number += 1


def graphed(step: Step) -> Step:
    """The step as a CUDA graph replay: the time on the device alone, without launches."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0)
    return lambda _: graph.replay()


def _seconds(clock: Callable[[], float], step: Step, count: int) -> float:
    start = clock()
    for number in range(count):
        step(number)
    return clock() - start


def _cuda_seconds(step: Step, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    for number in range(count):
        step(number)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


_CLOCKS: dict[str, Callable[[Step, int], float]] = {
    "wall": partial(_seconds, time.perf_counter),
    "cpu": partial(_seconds, time.process_time),
    "cuda": _cuda_seconds,
}
