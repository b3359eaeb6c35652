"""The benchmarks by name."""

import importlib

from l2r.cost.benchmarks.bench_settings import BenchSettings, check_bench
from l2r.cost.benchmarks.results import Bench


def run_bench(name: str, settings: BenchSettings) -> Bench:
    """Run the benchmark of a module here. Raises ValueError for an unknown name."""
    check_bench(name)
    bench: Bench = importlib.import_module(f"l2r.cost.benchmarks.{name}").run(settings)
    return bench
