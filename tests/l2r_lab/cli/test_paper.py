"""l2r paper: what can be made is written, what cannot is named with what it lacks."""

import json

import yaml

from l2r.files.folder import RunFolder


def test_items_without_runs_are_written_and_the_others_named(l2r, tmp_path):
    done = l2r("paper", tmp_path, "--out", tmp_path / "paper")
    assert done.code == 1
    written = {path.name for path in (tmp_path / "paper").iterdir()}
    stems = ("table-9", "figure-3", "figure-8")
    assert written == {f"{s}.{end}" for s in stems for end in ("html", "json")} | {"index.html"}
    assert "missing: Table 1: no run of Linear in runs/olmoe-1b-7b" in done.err
    assert (
        "missing: Table 10: there is no inference/inference.json; l2r bench inference" in done.err
    )
    assert "24 of 27 tables and figures are missing" in done.err
    rows = json.loads((tmp_path / "paper" / "table-9.json").read_text())
    assert [row["16"] for row in rows][:2] == ["131.072K (6.25%)", "229.376K (10.94%)"]


def test_a_run_that_goes_on_is_named_with_its_step(l2r, tmp_path):
    run = RunFolder(tmp_path / "runs" / "olmoe-1b-7b" / "linear")
    run.create()
    recipe = {"router": {"kind": "linear"}, "training": {"steps": 10}}
    run.recipe.write_text(yaml.safe_dump(recipe))
    run.append_metrics({"kind": "train", "step": 3, "tokens": 30})
    done = l2r("paper", tmp_path, "--out", tmp_path / "paper")
    assert f"missing: Table 1: {run.path} is at step 3 of 10" in done.err


def test_toy_data_is_written_once(l2r, tmp_path):
    done = l2r("data", "toy", "--out", tmp_path)
    assert done.code == 0, done.err
    assert sum(1 for _ in (tmp_path / "mix").rglob("*.*z*")) == 2903
    assert sum(1 for _ in (tmp_path / "imagenet").rglob("*.png")) == 24
    again = l2r("data", "toy", "--out", tmp_path)
    assert again.code == 2 and "out must hold none of mix, c4, imagenet" in again.err
