"""The benchmark behind the paper's table of inference overhead, on a tiny model."""

from l2r.cost.benchmarks import run_bench
from l2r.cost.benchmarks.results import BenchSettings


def test_inference_times_prefill_and_decode_of_every_router_against_the_linear_one() -> None:
    records = run_bench("inference", BenchSettings(seconds=0.001, quick=True)).records
    phases = {phase: [r for r in records if r["phase"] == phase] for phase in ("prefill", "decode")}
    tokens = {"prefill": 16, "decode": 1}
    for phase, rows in phases.items():
        names = {row["contender"] for row in rows}
        assert {"stock", "l2r, linear", "l2r, l2r_sips H16"} <= names
        linear = next(r["latency_ms"] for r in rows if r["contender"] == "l2r, linear")
        for row in rows:
            assert row["low_ms"] <= row["latency_ms"] <= row["high_ms"]
            speed = 1000 * tokens[phase] / row["latency_ms"]
            assert abs(row["tokens_per_second"] / speed - 1) < 1e-9
            assert abs(row["over_linear"] / (row["latency_ms"] / linear) - 1) < 1e-9
