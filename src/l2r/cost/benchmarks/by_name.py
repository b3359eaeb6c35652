"""The benchmarks by name."""

import importlib

from l2r.cost.benchmarks.results import Bench, BenchSettings

BENCHES = ("router", "memory", "scaling", "moe", "step", "inference", "routes")


def run_bench(name: str, settings: BenchSettings) -> Bench:
    """Run the benchmark of a module here. Raises ValueError for an unknown name."""
    if name not in BENCHES:
        raise ValueError(f"benchmark must be one of {', '.join(BENCHES)}; got {name!r}")
    bench: Bench = importlib.import_module(f"l2r.cost.benchmarks.{name}").run(settings)
    return bench
