"""``l2r eval`` on a checkpoint folder and on a run folder."""

import json

import pytest
import typer
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
