"""``l2r report``: the page of a run that goes on, and of one without a diagnosis."""

import json
import re
import shlex
import shutil
import signal
import threading
import time

import pytest

from l2r.cli import main
from l2r.files.folder import RunFolder, find_runs
from l2r_lab.report.comparison import comparison_table
from l2r_lab.training import loop
from l2r_lab.training.recipes.load import load_recipe
from tests.processes import Running

RELOADS = "http-equiv='refresh' content='1'"


@pytest.fixture(scope="module")
def finished(tiny_changes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    recipe = load_recipe("demo/l2r-sips", [*tiny_changes, "training.logger=none"])
    loop.train(recipe, folder, show_progress=False)
    return folder


@pytest.fixture
def going(finished, tmp_path):
    """The same run at step 2, without its final weights."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "model")
    RunFolder(folder).cut_metrics(2)
    return folder


def wait_for(true):
    end = time.monotonic() + 100
    while not true():
        assert time.monotonic() < end, "waited 100 s"
        time.sleep(0.02)


@pytest.mark.slow("a command that waits")
def test_the_page_follows_the_run_and_the_command_ends_with_it(l2r, finished, going):
    page, ended = going / "report.html", []
    watching = threading.Thread(
        target=lambda: ended.append(l2r("report", going, "--watch", "--interval", 1, "--json"))
    )
    watching.start()
    wait_for(page.is_file)
    first = page.read_text()
    assert RELOADS in first and "Still training" in first and first.endswith("</html>")
    tokens = [r["tokens"] for r in RunFolder(finished).read_metrics("train")]
    assert f"{tokens[1]:,} tokens each" in first
    shutil.copy(finished / "metrics.jsonl", going / "metrics.jsonl")
    wait_for(lambda: f"{tokens[-1]:,} tokens each" in page.read_text())
    assert RELOADS in page.read_text() and not ended
    shutil.copytree(finished / "model", going / "model")
    watching.join(60)
    (end,) = ended
    assert end.code == 0 and len(json.loads(end.out)) == 1
    assert "refresh" not in page.read_text().partition("</head>")[0]


def test_a_page_is_written_once_for_every_change(going, monkeypatch):
    run, naps = RunFolder(going), []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            run.append_metrics({"kind": "train", "step": 3})
        if len(naps) == 5:
            run.model.mkdir()
            (run.model / "config.json").write_text("{}")

    monkeypatch.setattr("l2r.files.folder.time.sleep", nap)
    assert [len(naps) for _ in run.changes(7)] == [0, 3]
    assert naps == [7] * 5


def test_an_average_belongs_to_a_finished_run(finished, going):
    run = RunFolder(going)
    text = run.recipe.read_text().replace("ema_decay: 0.0", "ema_decay: 0.9")
    run.recipe.write_text(text)
    shutil.copytree(finished / "model", run.model)
    assert not run.is_finished() and RunFolder(finished).is_finished()
    shutil.copytree(finished / "model", run.averaged_model)
    assert run.is_finished()


@pytest.mark.slow("a command that waits")
def test_ctrl_c_ends_it_in_one_line(going, tmp_path):
    process = Running(tmp_path / "output", main, ["report", str(going), "--watch"])
    wait_for((going / "report.html").is_file)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert process.err.splitlines()[-1] == "interrupted" and "Traceback" not in process.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interval", "0"], "interval must be >= 1 second; got 0"),
        (["--interval", "nan"], "interval must be >= 1 second; got nan"),
    ],
)
def test_bad_input_is_one_line(l2r, going, arguments, message):
    assert message in l2r("report", going, "--watch", *arguments).refusal()


def test_a_folder_of_runs_is_not_watched(l2r, going):
    line = l2r("report", going.parent, "--watch").refusal()
    assert "--watch follows one run" in line and "which holds 1" in line


@pytest.mark.slow("a chain of commands")
def test_the_command_under_the_table_fills_the_columns_of_routing(
    l2r, finished, text_folder, tmp_path
):
    root = tmp_path / "two runs"  # a path that a shell would cut
    shutil.copytree(finished, root / "run")
    assert l2r("report", root).code == 0
    (row,) = json.loads(l2r("report", root, "--json").out)
    assert row["stability"] is None
    assert "fills the columns of routing" in (root / "report.html").read_text()
    command = re.search(r"`l2r (diagnose .*?)` fills", comparison_table(find_runs(root)).caption)[1]
    few = ("--instances", 4, "--length", 16, "--certify", 0, "--gain", 2, "--text-tokens", 0)
    assert l2r(*shlex.split(command), *few, "--data", text_folder).code == 0
    (row,) = json.loads(l2r("report", root, "--json").out)
    columns = ("mean margin", "stability", "load entropy", "routing gain")
    assert all(isinstance(row[column], float) for column in columns)
