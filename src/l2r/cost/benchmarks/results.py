"""A benchmark's settings and result: records that JSON, tables and figures read."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from l2r.cost.benchmarks.bench_settings import BenchSettings
from l2r.cost.benchmarks.timing import Step, Timing, measure
from l2r.kernels.native.build import library
from l2r.machine import describe_machine
from l2r.runs.atomic import write_json


def environment() -> dict[str, Any]:
    """The machine, in one level: a benchmark prints it as one line.

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


@dataclass
class Bench:
    """Records of one benchmark, all with the same keys, and where they were taken.

    turns: of every group of contenders its label, the base of its ratios, and seconds by turn.
    groups: how many groups it measures in all.
    """

    name: str
    settings: BenchSettings
    note: str = ""
    groups: int = 1
    records: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=environment)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **record: Any) -> None:
        """Append one record."""
        self.records.append(record)

    def measure(
        self,
        steps: Mapping[str, Step],
        base: str,
        group: str,
        *,
        share: float = 1.0,
        rounds: int = 9,
    ) -> dict[str, Timing]:
        """Time a group of contenders in turns, for ``share`` of the seconds of a group.

        Turns are kept for ratios to the fastest contender whose name starts with ``base``.
        """
        settings = self.settings
        before = len(self.turns)
        self.report(before, group)
        times = measure(
            steps,
            device=settings.device,
            seconds=share * settings.seconds,
            kind=settings.clock,
            rounds=rounds,
            on_turn=lambda turns: self.report(before + turns / rounds, group),
        )
        self.report(before + 1, group)
        bases = {name: time.median for name, time in times.items() if name.startswith(base)}
        turns = {name: list(time.turns) for name, time in times.items()}
        least = min(bases, key=lambda name: bases[name])
        self.turns.append({"group": group, "base": least, "seconds": turns})
        return times

    def compare(
        self,
        steps: Mapping[str, Step],
        base: str,
        unit: str,
        group: str,
        *,
        share: float = 1.0,
        rounds: int = 9,
    ) -> dict[str, dict[str, float]]:
        """``measure`` as fields of records, with ratios to the fastest named ``base``."""
        times = self.measure(steps, base, group, share=share, rounds=rounds)
        least = times[self.turns[-1]["base"]]
        return {name: {**time.columns(unit), **time.over(least)} for name, time in times.items()}

    def report(self, done: float, what: str) -> None:
        """Pass the share of the groups that are done on to ``settings.watch``."""
        if self.settings.watch is not None:
            self.settings.watch(round(100 * done / self.groups), 100, what)

    def as_dict(self) -> dict[str, Any]:
        """Dictionary that ``save`` writes."""
        stored = asdict(replace(self, settings=replace(self.settings, watch=None)))
        del stored["settings"]["watch"], stored["groups"]
        return stored


def save_bench(bench: dict[str, Any], folder: Path) -> Path:
    """Write ``as_dict``'s form to ``<name>.json``, whole or not at all."""
    path = folder / f"{bench['name']}.json"
    write_json(path, bench)
    return path
