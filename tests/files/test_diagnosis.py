"""A saved diagnosis is read back whole."""

import math
from pathlib import Path

import numpy as np
import pytest

from l2r.files.diagnosis import USAGE, Diagnosis, is_diagnosed, read_diagnosis
from l2r.files.reading import parse_json


def made() -> Diagnosis:
    """Two layers with three experts and two domains."""
    random = np.random.default_rng(0)
    arrays = {f"{layer}.{kind}": random.random(3) for kind in USAGE for layer in (0, 1)}
    arrays |= {f"{layer}.usage_by_domain": random.integers(0, 9, (2, 3)) for layer in (0, 1)}
    layers = [
        {"name": "a", "cv": 0.25, "stability_interval": [0, 1], "redundancy": 1.0},
        {"name": "b", "cv": 0.75, "stability_interval": [0, 1]},
    ]
    return Diagnosis({"domains": ["one", "two"]}, layers, arrays)


def test_usage_is_by_layer(tmp_path: Path) -> None:
    diagnosis = made()
    assert not is_diagnosed(tmp_path)
    diagnosis.save(tmp_path)
    assert is_diagnosed(tmp_path)
    saved = read_diagnosis(tmp_path)
    assert saved.mean() == {"cv": 0.5}
    for name in ("topk", "usage_by_domain"):
        assert np.array_equal(saved.by_layer(name)[1], diagnosis.arrays[f"1.{name}"])


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_number_that_is_not_finite_is_saved_as_json_and_left_out_of_means(tmp_path, value):
    """As the radius of a router whose tokens go to all experts: nothing can change its set."""
    diagnosis = made()
    diagnosis.layers[1]["cv"] = value
    diagnosis.info["model"] = {"routing_gain": value, "cross_entropy": 5.0}
    diagnosis.save(tmp_path)
    text = parse_json((tmp_path / "diagnosis.json").read_bytes())
    assert text["layers"][1]["cv"] is None and text["layers"][0]["cv"] == 0.25
    assert read_diagnosis(tmp_path).numbers() == {"cross_entropy": 5.0}


def test_a_diagnosis_without_an_array_is_refused(tmp_path: Path) -> None:
    diagnosis = made()
    del diagnosis.arrays["1.importance"]
    diagnosis.save(tmp_path)
    with pytest.raises(ValueError, match="layers without their use of experts"):
        read_diagnosis(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no diagnosis; l2r diagnose writes one"),
        ('{"schema": 2}', "schema must be 1; got 2"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"schema": 1, "info": {}, "layers": []}', "cannot be read"),
    ],
)
def test_what_is_no_diagnosis_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "diagnosis.json").write_text(text)
        (tmp_path / "diagnosis.safetensors").write_text("no arrays")
    with pytest.raises(ValueError, match=message) as error:
        read_diagnosis(tmp_path)
    assert str(tmp_path) in str(error.value)
