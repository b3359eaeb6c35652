"""The benchmark of recorded and replayed routes times all forms, of which none may be wrong."""

import numpy as np
import pytest

from benchmarks.routes import PHASES, changed, run
from l2r.hf.routes import Fingerprint, Routes
from l2r_lab.bench_settings import BenchSettings

FORMS = {"plain", "second plain", "record", "replay own", "replay other"}


@pytest.mark.slow("every model of a benchmark")
def test_every_model_is_timed_plain_recorded_and_replayed() -> None:
    found = run(BenchSettings(seconds=0.001, quick=True))
    names = {record["size"] for record in found.records}
    assert names == {"demo", "olmoe, stock", "olmoe, swapped"}
    for name in names:
        for phase in PHASES:
            rows = [r for r in found.records if (r["size"], r["phase"]) == (name, phase)]
            assert {row["contender"] for row in rows} == FORMS
            assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in rows)


def test_one_token_in_ten_has_one_other_expert() -> None:
    fingerprint = Fingerprint(num_experts=8, top_k=3, layers=(0, 1))
    experts = np.stack([np.stack([np.array([0, 1, t % 6 + 2])] * 2) for t in range(25)])
    own = Routes(experts.astype(np.uint8), fingerprint, np.array([25]))
    other = changed(own)
    differ = (np.sort(own.experts) != np.sort(other.experts)).any(axis=(1, 2))
    assert np.flatnonzero(differ).tolist() == [0, 10, 20]
    assert (other.experts[differ][..., :2] == own.experts[differ][..., :2]).all()
