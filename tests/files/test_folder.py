"""The run folder: records up to a damaged one, checkpoints that are whole, what is finished."""

import json
import math
from pathlib import Path

import pytest

from l2r.files.folder import RunFolder, find_runs
from l2r.files.reading import parse_json

RECORDS = [{"kind": "train", "step": n, "ce": float(n), "load": [0.5, math.nan]} for n in (1, 2, 3)]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    for record in RECORDS:
        run.append_metrics(record)
    return run


@pytest.mark.parametrize(
    "damaged",
    [
        '{"kind": "train", "st',
        "[1]",
        '{"kind": "train"}',
        '{"kind": "train", "step": 1e999}',
        '{"kind": "train", "step": true}',
        '{"kind": "train", "step": "4"}',
        '{"step": 4}',
        '{"kind": "train", "step": 4, "ce": "low"}',
        '{"kind": "train", "step": 4, "ce": {}}',
        '{"kind": "train", "step": 4, "load": [[1]]}',
        "[" * 10_000,
    ],
)
def test_records_are_read_up_to_a_damaged_one(run: RunFolder, damaged: str) -> None:
    """What comes after it is of a run that went on from before it, and is written again."""
    after = json.dumps({"kind": "train", "step": 5})
    with run.metrics.open("a") as stream:
        stream.write(f"{damaged}\n{after}\n")
    assert run.read_metrics() == RECORDS


def test_records_are_of_a_kind_and_read_again_once_there_are_more(run: RunFolder) -> None:
    assert run.read_metrics("train") == RECORDS and run.read_metrics("validation") == []
    more = {"kind": "validation", "step": 3, "ce/mean": float("nan")}
    run.append_metrics(more)
    (read,) = run.read_metrics("validation")
    assert read["step"] == 3 and read["ce/mean"] != read["ce/mean"]


def test_every_line_is_json_and_what_is_not_finite_is_read_as_nan(run: RunFolder) -> None:
    """Python alone reads NaN and Infinity; a resumed run writes its records again."""
    more = {"kind": "validation", "step": 3, "ce": math.inf, "load": [1.0, math.nan]}
    run.append_metrics(more)
    for _ in range(2):
        for line in run.metrics.read_bytes().splitlines():
            parse_json(line)  # refuses both
        (read,) = run.read_metrics("validation")
        assert math.isnan(read["ce"]) and read["load"][0] == 1.0 and math.isnan(read["load"][1])
        run.cut_metrics(3)


@pytest.mark.parametrize("step", [0, 2, 9])
def test_records_are_cut_after_a_step(run: RunFolder, step: int) -> None:
    run.cut_metrics(step)
    assert [record["step"] for record in run.read_metrics()] == [n for n in (1, 2, 3) if n <= step]


def test_only_whole_checkpoints_count_the_oldest_first(run: RunFolder) -> None:
    for name in ("step-00000010", "step-00000009", ".step-00000011.part", "other"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / "state.json").write_text("{}")
    (run.checkpoints / "step-00000012").mkdir()  # no state.json: it was cut
    names = [folder.name for folder in run.complete_checkpoints()]
    assert names == ["step-00000009", "step-00000010"]


@pytest.mark.parametrize("average", [0, 0.99])
def test_a_run_is_finished_with_all_that_its_recipe_keeps(run: RunFolder, average: float) -> None:
    run.recipe.write_text(f"training: {{ema_decay: {average}}}\n")
    assert not run.is_finished()
    run.write_json(run.model / "config.json", {})
    assert run.is_finished() == (average == 0)
    run.write_json(run.averaged_model / "config.json", {})
    assert run.is_finished()


def test_a_folder_is_one_runs_at_a_time(run: RunFolder) -> None:
    with run.lock(), pytest.raises(ValueError, match="in use by another run"), run.lock():
        pass
    with run.lock():
        pass


def test_runs_are_found_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        RunFolder(tmp_path / name).create()
        (tmp_path / name / "recipe.yaml").write_text("")
    (tmp_path / "no run").mkdir()
    assert [run.name for run in find_runs(tmp_path)] == ["a", "b", "c"]
    assert [run.name for run in find_runs(tmp_path / "b")] == ["b"]
    with pytest.raises(ValueError, match="is not a run folder and holds none"):
        find_runs(tmp_path / "no run")


def test_nothing_of_the_test_whether_a_folder_can_be_written_stays(tmp_path: Path) -> None:
    RunFolder(tmp_path / "new").create()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("name", ["checkpoints", "model", "model-ema", "evaluation", "wandb"])
def test_a_folder_below_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path)
    with pytest.raises(ValueError, match=f"{name} is a link, and nothing is written through"):
        RunFolder(tmp_path).create()


def test_a_run_that_goes_on_removes_what_a_kill_left(run: RunFolder) -> None:
    cut = run.path / ".environment.json.0123456789abcdef.part"
    cut.write_text("{")
    half = run.checkpoints / ".step-00000123.part"
    half.mkdir(parents=True)
    (half / "shard").touch()
    with run.lock():
        assert not cut.exists() and not half.exists() and run.read_metrics() == RECORDS
