"""Speed and memory, measured in alternating rounds; a wrong result gets no speed."""

from l2r.benchmarks.results import Bench, Settings

__all__ = ["Bench", "Settings"]
