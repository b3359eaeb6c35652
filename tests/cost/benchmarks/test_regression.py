"""A benchmark against an earlier one: slower beyond noise is found, noise is not."""

import copy
import json
import random

import pytest

from l2r.cost.benchmarks import regression, run_bench
from l2r.cost.benchmarks.regression import bench_changes
from l2r.cost.benchmarks.results import BenchSettings


def bench(seed, slower=1.0, turns=9, noise=0.03):
    """Two groups of four contenders whose turns have lognormal noise, shared and their own."""
    draw = random.Random(seed)
    groups = []
    for group in ("forward, 8 tokens", "forward, 1 tokens"):
        pace = [draw.lognormvariate(0, 0.5) for _ in range(turns)]  # the machine is busy
        times = {"linear, fused": 2.0, "l2r_sips H16, fused": 1.0, "xmoe, fused": 1.5}
        times["l2r_sips H16, fused"] *= slower if group == "forward, 8 tokens" else 1
        seconds = {
            name: [time * p * draw.lognormvariate(0, noise) for p in pace]
            for name, time in times.items()
        }
        groups.append({"group": group, "base": "linear, fused", "seconds": seconds})
    return {"name": "router", "settings": {"quick": True}, "turns": groups}


def test_a_contender_that_became_slower_is_named_and_no_other():
    found = bench_changes(bench(0), bench(1, slower=1.2))
    assert len(found) == 4  # two groups, without their bases
    (change,) = [change for change in found if change.regressed]
    assert (change.group, change.contender) == ("forward, 8 tokens", "l2r_sips H16, fused")
    assert change.now / change.before == pytest.approx(1.2, rel=0.05)
    assert "l2r_sips H16, fused, 0." in str(change) and "of linear, fused" in str(change)


@pytest.mark.slow("timed runs")
def test_noise_of_a_busy_machine_is_no_regression_and_a_faster_one_neither():
    """The pace of a turn, here up to fivefold, is in both times of a ratio."""
    falsely = [
        any(c.regressed for c in bench_changes(bench(2 * i), bench(2 * i + 1))) for i in range(40)
    ]
    assert sum(falsely) <= 2
    assert not any(change.regressed for change in bench_changes(bench(0), bench(1, slower=0.7)))


def test_small_changes_and_too_few_turns_are_no_regression():
    assert not any(c.regressed for c in bench_changes(bench(0), bench(1, slower=1.03, noise=0.001)))
    few = bench_changes(bench(0, turns=2), bench(1, slower=3.0, turns=2))
    assert not any(change.regressed for change in few)
    assert {change.least_p for change in few} == {4 / 6}  # C(4, 2) splits, four contenders


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "moe"}, "same name"),
        ({"settings": {"quick": False}}, "same settings"),
        ({"turns": []}, "must have turns"),
        ({"turns": [{"group": "other", "base": "linear", "seconds": {}}]}, "must have the group"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        bench_changes({**bench(0), **change}, bench(1))


@pytest.mark.parametrize("name", ["router", "moe"])
def test_every_timed_contender_has_its_turns(name):
    found = run_bench(name, BenchSettings(seconds=0.02, quick=True)).as_dict()
    timed = [record for record in found["records"] if record.get("correct", True)]
    assert sum(len(group["seconds"]) for group in found["turns"]) == len(timed)
    for group in found["turns"]:
        assert len({len(times) for times in group["seconds"].values()}) == 1
        assert group["base"] in group["seconds"]


@pytest.mark.slow("timed runs")
def test_the_command_compares_with_a_file_and_exits_1_on_a_regression(l2r, tmp_path, monkeypatch):
    asked = ("bench", "moe", "--quick", "--seconds", "0.02")
    first = l2r(*asked, "--out", tmp_path)
    assert first.code == 0, first
    saved = json.loads((tmp_path / "moe.json").read_text())
    for group in saved["turns"]:
        for name, times in group["seconds"].items():
            if name != group["base"]:
                group["seconds"][name] = [time / 100 for time in times]
    for path, factor, turns in (
        ("fast.json", 1, None),
        ("slow.json", 10_000, None),
        ("one_turn.json", 1, 1),  # of how many turns a machine has time for, none tell then
    ):
        changed = copy.deepcopy(saved)
        for group in changed["turns"]:
            group["seconds"] = {
                name: [t if name == group["base"] else t * factor for t in times[:turns]]
                for name, times in group["seconds"].items()
            }
        (tmp_path / path).write_text(json.dumps(changed))
    # Of three turns, and with Holm's over all contenders.
    monkeypatch.setattr(regression, "REGRESSION_ALPHA", 0.5)
    ended = l2r(*asked, "--against", tmp_path / "fast.json")
    assert ended.code == 1 and "slower: " in ended.out, ended
    ended = l2r(*asked, "--against", tmp_path / "slow.json")
    assert ended.code == 0 and "0 of " in ended.out and "too few turns" not in ended.err, ended
    monkeypatch.undo()
    assert "too few turns to detect" in l2r(*asked, "--against", tmp_path / "one_turn.json").err
    line = l2r(*asked, "--against", tmp_path / "none.json").refusal()
    assert "--against must be a file or a folder that exists" in line
