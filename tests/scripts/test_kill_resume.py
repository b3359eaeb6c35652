"""The script that kills training: a difference of one byte is seen and ends with code 1."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "proofs" / "kill_resume.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kill_resume", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def export(folder: Path, *, weights=b"\x00" * 64, loss=1.0, speed=5.0) -> Path:
    for name in ("model", "model-ema"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        (folder / name / "model.safetensors").write_bytes(weights)
    record = {"kind": "train", "step": 1, "ce": loss, "per_second": speed}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_one_byte_one_number_or_one_file_is_a_difference(script, tmp_path):
    one = export(tmp_path / "one")
    assert script.differences(one, export(tmp_path / "same", speed=9.0)) == []
    other = export(tmp_path / "byte", weights=b"\x00" * 63 + b"\x01")
    assert script.differences(one, other) == [
        "model/model.safetensors",
        "model-ema/model.safetensors",
    ]
    assert script.differences(one, export(tmp_path / "number", loss=1.5)) == ["metrics.jsonl"]
    missing = export(tmp_path / "missing")
    (missing / "model" / "model.safetensors").unlink()
    assert script.differences(one, missing) == ["model/model.safetensors"]


@pytest.mark.parametrize(("found", "code"), [((), 0), (("model/model.safetensors",), 1)])
def test_any_difference_ends_with_code_1(script, found, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("L2R_CACHE", str(tmp_path))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(script, "finish", lambda folder: None)
    trials = iter([script.Trial((3,), 0, ()), script.Trial((1, 7), 1, found)])
    monkeypatch.setattr(script, "run_trial", lambda *args: next(trials))
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["kill_resume.py", "--trials", "2", "--out", str(page)])
    assert script.main() == code
    verdict = f"{2 - code} of 2 trials (3 kills) ended bit-identical"
    assert verdict in capsys.readouterr().out and verdict in page.read_text()
