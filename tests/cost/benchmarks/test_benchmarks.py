"""The harness times only what is right, and its results can be read back and drawn."""

import importlib.metadata
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from l2r.cost.benchmarks import BENCHES, moe, results, router, run_bench
from l2r.cost.benchmarks import contenders as entries
from l2r.cost.benchmarks.machine_speed import MachineSpeed
from l2r.cost.benchmarks.results import BenchSettings, environment, save_bench
from l2r.cost.benchmarks.timing import Timing, measure
from l2r.report.performance import (
    bars_figure,
    bench_section,
    bench_table,
    groups,
    of_bench,
    read_bench,
    scaling_figure,
)
from tests.tiers import few

QUICK = BenchSettings(seconds=0.02, quick=True)


def test_contenders_take_turns_and_the_slow_one_is_slower() -> None:
    calls = []

    def step(name: str, size: int):  # type: ignore[no-untyped-def]
        def run(number: int) -> None:
            calls.append(name)
            torch.zeros(size, size) @ torch.zeros(size, size)

        return run

    times = measure({"small": step("small", 8), "large": step("large", 300)}, device="cpu",
                    seconds=0.2, rounds=5)  # fmt: skip
    assert times["small"].low <= times["small"].median <= times["small"].high
    assert times["small"].median < times["large"].median
    turns = [name for name, other in itertools.pairwise(calls) if name != other]
    assert len(turns) >= 5


def test_a_result_names_what_computed_the_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels, name in ((None, "torch"), (object(), "C++")):
        monkeypatch.setattr(results, "library", lambda kernels=kernels: kernels)
        assert environment()["cpu_routers"] == name


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


@pytest.mark.parametrize("name", ["router", "memory", "moe"])
def test_quick_run_is_complete_and_survives_json(name: str, tmp_path: Path) -> None:
    found = run_bench(name, QUICK).as_dict()
    again = json.loads(save_bench(found, tmp_path).read_text())
    assert again["records"] == found["records"]
    assert again["environment"]["torch"] == importlib.metadata.version("torch")
    assert {"processor", "threads", "gpu"} <= set(again["environment"])
    keys = [set(record) for record in again["records"]]
    assert keys
    assert all(key == keys[0] for key in keys)
    assert bench_table(again).records() == again["records"]
    for group in groups(again):
        bars = bars_figure(again, group).data[0]
        assert len(set(bars.y)) == len(bars.x) >= 3


@pytest.mark.parametrize("name", few(BENCHES, ("router",), "timed runs"))
def test_who_watches_sees_what_is_done_of_all_and_stores_nothing(name: str) -> None:
    seen: list[tuple[int, int, str]] = []
    watched = replace(QUICK, watch=lambda *now: seen.append(now))
    stored = run_bench(name, watched).as_dict()
    done = [percent for percent, _, _ in seen]
    assert done == sorted(done) and done[0] == 0 and done[-1] == 100
    assert len(set(done)) > 3 and {total for _, total, _ in seen} == {100}
    json.dumps(stored)


@pytest.mark.slow("timed runs")
def test_scaling_has_every_axis_and_draws_it() -> None:
    found = run_bench("scaling", QUICK).as_dict()
    for axis in ("tokens", "experts", "heads", "rank", "hidden"):
        for column in ("median_us", "peak_mib"):
            assert len(scaling_figure(found, axis, column=column).data) == 4


def test_settings_name_the_wrong_field() -> None:
    seconds = [{"seconds": value} for value in (0.0, math.nan, math.inf)]
    for options in ({"device": "tpu"}, *seconds, {"clock": "sun"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            BenchSettings(**options)
    with pytest.raises(ValueError, match="benchmark must be one of"):
        run_bench("speed", QUICK)


def test_command_prints_records_and_writes_a_page(l2r, tmp_path: Path) -> None:
    code, out, err = l2r("bench", "memory", "--quick", "--json", "--out", tmp_path)
    assert code == 0, err
    assert json.loads(out)[0]["contender"] == "linear, plain"
    assert (tmp_path / "memory.json").exists()
    assert "Performance" in (tmp_path / "memory.html").read_text()


@pytest.mark.slow("timed runs")
def test_a_report_shows_benchmarks_and_refuses_other_files(tmp_path: Path) -> None:
    save_bench(run_bench("scaling", QUICK).as_dict(), tmp_path)
    section = bench_section(read_bench(tmp_path / "scaling.json"))
    assert section.title == "Speed: scaling"
    assert len(section.parts) == 11  # five axes, time and memory each, and the table
    for text in ("{}", "[]", "no json", '{"name": "x", "records": 3}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match="written by l2r bench --out"):
            read_bench(tmp_path / "other.json")


def test_a_ratio_is_of_the_same_turn_with_quartiles() -> None:
    own, base = Timing(3.0, 1.0, 20.0, (1.0, 3.0, 20.0)), Timing(2.0, 1.0, 10.0, (1.0, 2.0, 10.0))
    assert own.over(base) == {"ratio": 1.5, "ratio_low": 1.25, "ratio_high": 1.75}


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


def scaled(contender: str, value: int, us: float, ratio: float) -> dict[str, object]:
    own = {"axis": "experts", "value": value, "phase": "forward", "contender": contender}
    return {**own, "median_us": us, "ratio": ratio, "ratio_low": ratio, "ratio_high": ratio}


def test_the_sentence_is_about_l2r_at_every_size_not_the_fastest_size() -> None:
    bench = {"name": "scaling", "records": [
        scaled("linear, plain", 8, 1.0, 1.0), scaled("l2r_sips, fused", 8, 1.5, 1.5),
        scaled("linear, plain", 64, 9.0, 1.0), scaled("l2r_sips, fused", 64, 3.0, 0.33),
    ]}  # fmt: skip
    assert of_bench(bench).startswith(
        "l2r: time ratio 0.33 (0.33-0.33) at forward, experts 64, to 1.50 (1.50-1.50) at forward, "
        "experts 8."
    )
    assert of_bench({"name": "router", "records": []}) == "Nothing was measured."


@pytest.mark.parametrize(
    ("limit", "words"), [(1.5, "at least 50% of it memory"), (0.001, "hardly any of it memory")]
)
def test_the_sentence_says_what_share_of_the_time_the_machine_needs(limit, words) -> None:
    linear = scaled("linear, plain", 8, 3.0, 1.0)
    own = {**scaled("l2r_sips, fused", 8, 3.0, 1.0), "limit_us": limit, "limited_by": "memory"}
    assert f"({words})" in of_bench({"name": "scaling", "records": [linear, own]})


def test_a_group_without_a_right_result_has_no_figure_and_the_page_is_written() -> None:
    bench = run_bench("memory", QUICK).as_dict()
    wrong = [{**record, "tokens": 7, "correct": False} for record in bench["records"]]
    right = [{**record, "correct": True} for record in bench["records"]]
    assert len(bench_section({**bench, "records": [*right, *wrong]}).parts) == 2
    assert of_bench({**bench, "records": wrong}) == "Nothing was measured."
