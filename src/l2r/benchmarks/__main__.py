"""``python -m l2r.benchmarks router --device cuda --out results``: no extras needed."""

import argparse
from pathlib import Path

from l2r.benchmarks.registry import BENCHES, run_bench
from l2r.benchmarks.results import Settings, save
from l2r.benchmarks.text import text_table


def main() -> None:
    """Run one benchmark, print its table and save its JSON and text."""
    parser = argparse.ArgumentParser(prog="python -m l2r.benchmarks", description=__doc__)
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--clock", default="wall")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    settings = Settings(given.device, given.seconds, given.quick, given.compiled, given.clock)
    bench = run_bench(given.name, settings)
    text = text_table(bench)
    print(text)
    if given.out is not None:
        save(bench.as_dict(), given.out)
        (given.out / f"{given.name}.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
