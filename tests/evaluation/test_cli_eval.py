"""``l2r eval`` on a checkpoint folder and on a run folder."""

import json
import shutil

import pytest
import torch
import typer
from transformers import OlmoeForCausalLM
from typer.testing import CliRunner

from l2r.cli import eval as command


def run(*arguments):
    app = typer.Typer()
    command.register(app)
    app.command("other")(lambda: None)
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def test_row_is_printed_and_written_and_a_second_run_reuses_it(checkpoint):
    result = run(checkpoint, "--tasks", "piqa,boolq", "--limit", 3)
    assert result.exit_code == 0, result.output
    for column in ("Hum", "SocSci", "BoolQ", "HSwag", "Overall", "standard error"):
        assert column in result.stdout
    assert "boolq: " in result.stderr and "contexts cut to the model's length" in result.stderr
    written = json.loads((checkpoint / "evaluation.json").read_text())
    assert written["tasks"]["piqa"]["documents"] == 3
    assert written["accuracy"]["PIQA"] == pytest.approx(100 * written["tasks"]["piqa"]["accuracy"])
    assert written["accuracy"]["Overall"] is None

    stored = checkpoint / "evaluation" / "piqa.json"
    before = stored.stat().st_mtime_ns
    again = run(checkpoint, "--tasks", "piqa,boolq", "--limit", 3, "--json")
    assert json.loads(again.stdout)[0]["PIQA"] == written["accuracy"]["PIQA"]
    assert stored.stat().st_mtime_ns == before  # nothing was scored again
    run(checkpoint, "--tasks", "piqa", "--limit", 2)
    assert stored.stat().st_mtime_ns != before  # other settings


def test_run_folder_gets_its_evaluation_file(checkpoint):
    result = run(checkpoint.parent, "--tasks", "piqa", "--limit", 2)  # it holds model/
    assert result.exit_code == 0, result.output
    assert (checkpoint.parent / "evaluation.json").is_file()


def test_two_checkpoints_are_compared_by_pairs_of_documents(checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    torch.manual_seed(2)
    model = OlmoeForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.5)
    model.save_pretrained(other)
    result = run(checkpoint, other, "--tasks", "piqa,boolq", "--limit", 12, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["Model"] for row in rows] == [
        "model", "standard error", "other", "standard error", "other - model", "95% from", "95% to"
    ]  # fmt: skip
    for task, column in (("piqa", "PIQA"), ("boolq", "BoolQ")):
        documents = []
        for folder in (checkpoint, other):
            path = folder / "evaluation" / f"{task}.documents.jsonl"
            settings, *lines = map(json.loads, path.read_text().splitlines())
            assert settings["limit"] == len(lines) == 12
            for line in lines:
                assert line["hit"] == (line["scores"].index(max(line["scores"])) == line["label"])
            documents.append({line["document"]: line["hit"] for line in lines})
        hits = [sum(d.values()) for d in documents]
        assert [rows[0][column], rows[2][column]] == pytest.approx([100 * n / 12 for n in hits])
        difference, low, high = (row[column] for row in rows[4:])
        assert difference == pytest.approx(100 * (hits[1] - hits[0]) / 12)
        assert low < difference < high
    assert rows[4]["Overall"] is None

    # Scored before documents were kept: the task is scored again, with the same result.
    kept = checkpoint / "evaluation" / "piqa.documents.jsonl"
    before = kept.read_bytes()
    kept.unlink()
    again = run(checkpoint, other, "--tasks", "piqa,boolq", "--limit", 12, "--json")
    assert json.loads(again.stdout) == rows and kept.read_bytes() == before


def test_several_checkpoints_need_folders_of_their_own(checkpoint, tmp_path):
    for arguments, message in (
        ((checkpoint, tmp_path, "--out", tmp_path / "x"), "out is for one checkpoint; got"),
        ((checkpoint, checkpoint), "checkpoints must differ"),
    ):
        error = run(*arguments).exception
        assert isinstance(error, ValueError) and message in str(error)


def test_results_can_go_elsewhere(checkpoint, tmp_path):
    run(checkpoint, "--tasks", "piqa", "--limit", 2, "--out", tmp_path / "results")
    assert (tmp_path / "results" / "evaluation.json").is_file()
    assert not (checkpoint / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "winogrande"], "tasks must be among"),
        (["--split", "train"], "split must be val or test"),
        (["--dtype", "int8"], "dtype must be one of float32"),
        (["--limit", "0"], "limit must be >= 1"),
    ],
)
def test_bad_options_are_one_value_error(checkpoint, arguments, message):
    result = run(checkpoint, *arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_folder_without_checkpoint_is_refused(tmp_path):
    result = run(tmp_path)
    assert isinstance(result.exception, ValueError)
    assert "checkpoint must be a folder with config.json" in str(result.exception)
