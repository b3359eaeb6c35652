"""Read a benchmark's options, collect its records, and print and save them."""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from l2r.cli.console import print_table
from l2r.errors import InputError
from l2r.files.atomic import check_place, plain_json, write_json
from l2r.machine import pick_device
from l2r_lab.bench_settings import CLOCKS, BenchSettings
from l2r_lab.timing import Step, Timing, bench_table, environment, measure


class Bench:
    """Records of one benchmark, all with the same keys; ``note`` says what its columns mean."""

    def __init__(self, name: str, settings: BenchSettings, note: str = "") -> None:
        self.name, self.settings, self.note = name, settings, note
        self.records: list[dict[str, Any]] = []

    def add(self, **record: Any) -> None:
        """Append one record."""
        self.records.append(record)

    def measure(
        self, steps: Mapping[str, Step], group: str, *, share: float = 1.0, rounds: int = 9
    ) -> dict[str, Timing]:
        """Time a group of contenders in turns, for ``share`` of the seconds of a group."""
        print(f"{self.name}: {group}", file=sys.stderr)
        seconds = share * self.settings.seconds
        return measure(steps, seconds=seconds, rounds=rounds, clock=self.settings.clock)

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
        """Time a group; fields of records, with ratios to the fastest whose name begins so."""
        times = self.measure(steps, group, share=share, rounds=rounds)
        fastest = min((t for n, t in times.items() if n.startswith(base)), key=lambda t: t.median)
        return {name: {**time.columns(unit), **time.over(fastest)} for name, time in times.items()}


def main(name: str, run: Callable[[BenchSettings], Bench]) -> int:
    """Run a benchmark by the options of the command line; its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=run.__doc__)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="time for one group of contenders"
    )
    parser.add_argument("--clock", default="wall", choices=CLOCKS, help="cpu: processor time")
    parser.add_argument("--compiled", action="store_true", help="torch.compile of plain code, too")
    parser.add_argument("--quick", action="store_true", help="small shapes, to try it")
    parser.add_argument("--json", action="store_true", help="print the records as JSON")
    parser.add_argument("--out", type=Path, help="a folder for NAME.json")
    given = parser.parse_args()
    try:
        device = pick_device(given.device)
        settings = BenchSettings(device, given.seconds, given.quick, given.compiled, given.clock)
        if given.out is not None:
            check_place(given.out)
    except InputError as error:
        parser.error(str(error))
    bench = run(settings)
    if given.json:
        print(plain_json(bench.records))
    else:
        print_table(bench_table(name, bench.note, bench.records))
    if given.out is not None:
        facts = {"name": name, "note": bench.note, "settings": asdict(settings)}
        written = {**facts, "environment": environment(), "records": bench.records}
        write_json(given.out / f"{name}.json", written)
    return 0
