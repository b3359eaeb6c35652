"""The benchmarks by name, imported when they run."""

import importlib

from l2r.benchmarks.results import Bench, Settings

BENCHES = ("router", "memory", "scaling", "moe", "step", "inference")


def run_bench(name: str, settings: Settings) -> Bench:
    """Run a benchmark. Raises ValueError for an unknown name."""
    if name not in BENCHES:
        raise ValueError(f"benchmark must be one of {', '.join(BENCHES)}; got {name!r}")
    bench: Bench = importlib.import_module(f"l2r.benchmarks.{name}").run(settings)
    return bench
