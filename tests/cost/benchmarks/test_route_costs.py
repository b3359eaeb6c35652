"""The benchmark of recorded and replayed routes times all forms, of which none may be wrong."""

import statistics

import numpy as np
import pytest

from l2r.cost.benchmarks import run_bench
from l2r.cost.benchmarks.results import BenchSettings
from l2r.cost.benchmarks.routes import PHASES, changed
from l2r.hf.routes import Fingerprint, Routes

FORMS = {"plain", "second plain", "record", "replay own", "replay other"}


@pytest.mark.slow("every model of a benchmark")
def test_every_model_is_timed_plain_recorded_and_replayed() -> None:
    found = run_bench("routes", BenchSettings(seconds=0.001, quick=True))
    names = {record["size"] for record in found.records}
    assert names == {"demo", "olmoe, stock", "olmoe, swapped"}
    for name in names:
        for phase in PHASES:
            rows = [r for r in found.records if (r["size"], r["phase"]) == (name, phase)]
            assert {row["contender"] for row in rows} == FORMS
            (turns,) = (t["seconds"] for t in found.turns if t["group"] == f"{name}, {phase}")
            for row in rows:
                own = turns[row["contender"]]
                each = [b / a for a, b in zip(turns["plain"], own, strict=True)]
                assert row["ratio"] == statistics.median(each)
                assert min(each) <= row["ratio"] <= row["ratio_high"]
                assert row["ratio_low"] <= row["ratio"]


def test_one_token_in_ten_has_one_other_expert() -> None:
    fingerprint = Fingerprint(num_experts=8, top_k=3, layers=(0, 1))
    experts = np.stack([np.stack([np.array([0, 1, t % 6 + 2])] * 2) for t in range(25)])
    own = Routes(experts.astype(np.uint8), fingerprint, np.array([25]))
    other = changed(own)
    differ = (np.sort(own.experts) != np.sort(other.experts)).any(axis=(1, 2))
    assert np.flatnonzero(differ).tolist() == [0, 10, 20]
    assert (other.experts[differ][..., :2] == own.experts[differ][..., :2]).all()
