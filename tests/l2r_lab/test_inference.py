"""The benchmark behind the paper's table of inference overhead, on a tiny model."""

import json

import pytest
import torch

from l2r.errors import InputError
from l2r_lab import inference
from l2r_lab.bench_settings import BenchSettings
from l2r_lab.inference import models, sizes, time_inference
from l2r_lab.report.paper_tables import INFERENCE_ROWS, inference_table

SETTINGS = BenchSettings(seconds=0.001)


@pytest.fixture(scope="module")
def records():
    return time_inference(SETTINGS, "tiny")


def test_inference_times_prefill_and_decode_of_every_router_against_the_linear_one(records) -> None:
    phases = {phase: [r for r in records if r["phase"] == phase] for phase in ("prefill", "decode")}
    tokens = {"prefill": 16, "decode": 1}
    for phase, rows in phases.items():
        names = [row["contender"] for row in rows]
        assert names == ["stock", *INFERENCE_ROWS, "L2R (SIPS)-H16, plain"]
        linear = next(r["latency_ms"] for r in rows if r["contender"] == "Linear")
        for row in rows:
            assert row["low_ms"] <= row["latency_ms"] <= row["high_ms"]
            assert (row["batch"], row["prompt"]) == (1, 16) and row["steps"] >= 3
            speed = 1000 * tokens[phase] / row["latency_ms"]
            assert abs(row["tokens_per_second"] / speed - 1) < 1e-9
            assert abs(row["over_linear"] / (row["latency_ms"] / linear) - 1) < 1e-9


def test_the_table_is_the_papers(records) -> None:
    """Four rows; tokens per second follow from the latency, ratios from the first row."""
    table = inference_table(records)
    assert [row[0] for row in table.rows] == list(INFERENCE_ROWS)
    assert table.columns[1:5] == (
        "Prefill latency (ms)", "Prefill tok/s", "Decode latency (ms/step)", "Decode tok/s"
    )  # fmt: skip
    _, *first = table.rows[0]
    assert first[4:] == [1.0, 1.0]
    for _, prefill, prefill_rate, decode, decode_rate, *ratios in table.rows:
        assert prefill_rate == pytest.approx(16_000 / prefill)
        assert decode_rate == pytest.approx(1_000 / decode)
        assert ratios == pytest.approx([prefill / first[0], decode / first[2]])
    assert "batch 1, prompt of 16 tokens; steps timed" in table.caption


def test_the_papers_size_is_its_model_and_shares_all_weights_but_the_routers() -> None:
    from l2r.hf.models import stock_olmoe

    with torch.device("meta"):
        paper = stock_olmoe(**sizes(SETTINGS, "paper"))
    assert round(sum(p.numel() for p in paper.parameters()) / 1e9, 2) == 6.92
    assert inference.prompt_length(SETTINGS, "paper") == 4096
    stock, *ours = models(SETTINGS, "tiny").values()
    shared = {name: p.data_ptr() for name, p in stock.named_parameters() if ".gate." not in name}
    assert len(ours) == 4
    for model in ours:
        assert shared.items() <= {n: p.data_ptr() for n, p in model.named_parameters()}.items()


def test_a_model_larger_than_the_memory_is_refused_before_it_is_made(monkeypatch) -> None:
    monkeypatch.setattr(inference, "available_memory", lambda: 20 * 10**9)
    with pytest.raises(InputError, match=r"paper needs 27\.7 GB on cpu, 20\.0 GB are free"):
        time_inference(SETTINGS)


def test_the_command_prints_and_saves_what_it_measured(l2r, tmp_path) -> None:
    words = ("--size", "tiny", "--seconds", 0.01, "--json", "--out", tmp_path)
    code, out, err = l2r("bench", "inference", *words)
    assert code == 0, err
    saved = json.loads((tmp_path / "inference.json").read_text())
    assert json.loads(out) == saved["records"] and saved["environment"]["torch"]
    assert saved["settings"]["size"] == "tiny"
