"""Benchmarks time only what is right, in turns, and print and save what they measured."""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench, memory, moe, router
from benchmarks import contenders as entries
from benchmarks.machine_speed import MachineSpeed
from l2r_lab.bench_settings import BenchSettings
from tests.tiers import few

QUICK = BenchSettings(seconds=0.02, quick=True)
NAMES = ("router", "memory", "scaling", "moe", "step", "routes")


def test_wrong_result_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = entries.is_correct

    def broken(contender: entries.Contender, x: torch.Tensor) -> bool:
        if contender.name == "l2r_sips H16, fused":
            with torch.no_grad():
                clean = contender.call
                contender.__dict__["call"] = lambda x: (clean(x)[0] + 1, *clean(x)[1:])
        return right(contender, x)

    monkeypatch.setattr(router, "is_correct", broken)
    found = router.run(QUICK)
    wrong = [r for r in found.records if r["contender"] == "l2r_sips H16, fused"]
    assert wrong
    assert all(r["correct"] is False and r["median_us"] is None for r in wrong)
    assert all(r["correct"] for r in found.records if r["contender"] == "linear, plain")


def test_experts_of_vit_s_are_timed_at_the_papers_sizes() -> None:
    """d 384, experts of width 1,536, 16 of them and k 2; 197 tokens an image, 4 images."""
    (vit,) = (shape for shape in moe.shapes(BenchSettings()) if shape.name == "vit-s")
    assert vit == moe.Shape("vit-s", 788, 384, 1536, 16, 2)


@pytest.mark.parametrize("name", few(NAMES, ("moe",), "timed runs"))
def test_every_benchmark_gives_records_with_the_same_keys(name: str) -> None:
    found = importlib.import_module(f"benchmarks.{name}").run(QUICK)
    assert found.name == name and found.note
    keys = [set(record) for record in found.records]
    assert len(keys) >= 3 and all(key == keys[0] for key in keys)
    assert all(record["ratio"] > 0 for record in found.records if record.get("correct", True))


def test_the_command_prints_a_table_and_saves_its_records(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(sys, "argv", ["memory", "--quick", "--out", str(tmp_path)])
    monkeypatch.setenv("COLUMNS", "200")
    assert bench.main("memory", memory.run) == 0
    text = capsys.readouterr().out
    assert "Benchmark: memory" in text and "linear, plain" in text
    saved = json.loads((tmp_path / "memory.json").read_text())
    assert saved["environment"]["torch"] == torch.__version__
    assert saved["settings"]["quick"] and saved["records"][0]["contender"] == "linear, plain"
    monkeypatch.setattr(sys, "argv", ["memory", "--quick", "--json"])
    assert bench.main("memory", memory.run) == 0
    assert json.loads(capsys.readouterr().out) == saved["records"]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--seconds", "nan"], "seconds must be > 0"), (["--out", "file"], "not a directory")],
)
def test_the_command_refuses_in_one_line(words, said, monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(sys, "argv", ["memory", *words])
    with pytest.raises(SystemExit) as ended:
        bench.main("memory", pytest.fail)
    assert ended.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]


def test_ratios_are_over_the_fastest_of_the_bases() -> None:
    made = bench.Bench("x", BenchSettings(seconds=0.05))
    a, b = torch.zeros(8, 8), torch.zeros(300, 300)
    steps = {"linear, slow": lambda _: b @ b, "linear, fast": lambda _: a @ a, "other": lambda _: b}
    found = made.compare(steps, "linear", "us", "group", rounds=3)
    assert found["linear, fast"]["ratio"] == 1 < found["linear, slow"]["ratio"]
    assert found["other"]["median_us"] < found["linear, slow"]["median_us"]


def test_peaks_are_counted_to_the_byte() -> None:
    def step(_: int) -> None:
        torch.zeros(1 << 20)
        torch.zeros(1 << 18), torch.zeros(1 << 18)

    assert memory.peak_bytes(step, "cpu") == 4 << 20


def test_settings_name_the_wrong_field() -> None:
    seconds = [{"seconds": value} for value in (0.0, math.nan, math.inf)]
    for options in ({"device": "tpu"}, *seconds, {"clock": "sun"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            BenchSettings(**options)


def test_the_limit_is_what_takes_longer() -> None:
    speed = MachineSpeed(flops=100.0, bytes=10.0)
    assert speed.limit(50.0, 1.0) == (0.5, "multiplications")
    assert speed.limit(50.0, 10.0) == (1.0, "memory")


def test_the_work_of_a_router_is_counted_by_hand() -> None:
    (gate,) = (
        e
        for e in entries.contenders(QUICK, hidden=64, experts=16, top_k=4)
        if e.name == "l2r_sips H16, fused"
    )
    x = torch.zeros(8, 64)
    flops = 2 * 8 * (64 * 2 + 16 * 16 * 2)  # rank 2, 16 anchors for each of 16 experts
    assert router._work(gate.router, x, "forward") == (flops, 8 * 64 * 4)
    assert router._work(gate.router, x, "forward+backward") == (3 * flops, 3 * 8 * 64 * 4)
