"""Speed and memory, measured in alternating rounds; a wrong result gets no speed.

Imports training/ and below. Begin at by_name.py; timing.py takes the turns.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.cost.benchmarks.bench_settings import BENCHES as BENCHES
    from l2r.cost.benchmarks.bench_settings import BenchSettings as BenchSettings
    from l2r.cost.benchmarks.bench_settings import check_bench as check_bench
    from l2r.cost.benchmarks.by_name import run_bench as run_bench
    from l2r.cost.benchmarks.machine_speed import product_speed as product_speed
    from l2r.cost.benchmarks.regression import REGRESSION_ALPHA as REGRESSION_ALPHA
    from l2r.cost.benchmarks.regression import bench_changes as bench_changes
    from l2r.cost.benchmarks.results import Bench as Bench
    from l2r.cost.benchmarks.results import save_bench as save_bench
else:
    __getattr__, __dir__ = lazy_names(__name__)
