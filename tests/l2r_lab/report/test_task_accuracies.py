"""Accuracies of Tables 1 and 14, in a terminal and on the page of runs."""

import json
import math
import re

import pytest

from l2r.cli.console import print_table
from l2r_lab.report.comparison import in_paper_order, write_report
from l2r_lab.report.paper_tables import downstream_table
from l2r_lab.report.task_accuracies import task_accuracies
from l2r_lab.training.evaluation.paper_rows import CHANCE, TASK_COLUMNS, paper_row
from l2r_lab.training.evaluation.task_scoring import TaskResult
from l2r_lab.training.evaluation.tasks import PAPER_TASKS
from tests.report.runs import made_run

ROUTERS = ("linear", "linear-sips", "xmoe", "l2r-dot", "l2r-cosine", "l2r-sips")
COUNTS = {"boolq": 512, "piqa": 512}  # the others have 256, the paper's
SETTINGS = {"split": "val", "limit": None, "requests": 1024, "max_length": None}


def result(task, hits):
    count = COUNTS.get(task, 256)
    share = hits / count
    return TaskResult(task, share, math.sqrt(share * (1 - share) / (count - 1)), share, count, 0)


def evaluation(extra, **settings):
    """What ``l2r eval`` writes for a run whose every task has ``extra`` hits above chance."""
    hits = {t.name: COUNTS.get(t.name, 256) // t.answers + extra for t in PAPER_TASKS}
    row = paper_row({name: result(name, count) for name, count in hits.items()})
    return {
        "settings": {**SETTINGS, **settings},
        "accuracy": row.accuracy,
        "standard_error": row.standard_error,
        "chance": CHANCE,
        "interval": {c: list(i)[1:] for c, i in row.interval.items()},
    }


@pytest.fixture
def six(tmp_path):
    runs = [made_run(tmp_path / name) for name in sorted(ROUTERS)]
    for run in runs:
        run.write_json(run.evaluation, evaluation(20 * ROUTERS.index(run.name)))
    return in_paper_order(runs)


def test_every_router_has_every_column_with_its_standard_error(six):
    (table,) = task_accuracies(six)
    assert table.columns == ("router", *TASK_COLUMNS)
    rows = {row["router"]: row for row in table.records()}
    assert tuple(rows) == ROUTERS
    # 64 of 256: sqrt(0.25 * 0.75 / 255) = 2.71 points; of four such groups half, 1.36
    assert rows["linear"]["SciQ"] == "25.0±2.7*"
    assert rows["linear"]["MMLU"] == "25.0±1.4*"
    # 256 of 512: sqrt(0.25 / 511) = 2.21 points
    assert rows["linear"]["PIQA"] == "50.0±2.2*"
    # 164 of 256 and 356 of 512
    assert rows["l2r-sips"]["SciQ"] == "64.1±3.0"
    assert rows["l2r-sips"]["BoolQ"] == "69.5±2.0"
    # (6 * 164 / 256 + 2 * 356 / 512) / 8; sqrt(6 * 3.005^2 + 2 * 2.037^2) / 8
    assert rows["l2r-sips"]["Overall"] == "65.4±1.0"
    assert all(cell for row in table.rows for cell in row), "no dash"


def test_the_page_shows_the_table_and_names_the_runs_without_one(six, tmp_path):
    bare = made_run(tmp_path / "bare")
    _, (page, *_) = write_report([*six, bare], tmp_path / "page.html")
    text = page.read_text()
    assert "25.0±2.7*" in text and "65.4±1.0" in text
    assert "Not evaluated: bare." in text
    assert task_accuracies([bare]) == []


def test_other_settings_and_missing_chance_are_said(six):
    six[0].write_json(six[0].evaluation, evaluation(0, requests=None, limit=100))
    old = {k: v for k, v in evaluation(0).items() if k != "chance"}
    six[1].write_json(six[1].evaluation, old)
    (table,) = task_accuracies(six)
    assert "different settings: they are not comparable" in table.caption
    assert "so not marked: linear-sips." in table.caption
    assert table.records()[1]["SciQ"] == "25.0±2.7"


def test_the_command_prints_the_accuracies_after_the_comparison(l2r, six, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    code, out, err = l2r("report", six[0].path.parent)
    assert code == 0, err
    assert out.index("Routers compared") < out.index("Downstream accuracy")
    for words in (*ROUTERS, "64.1±3.0", "SocSci"):
        assert words in out
    monkeypatch.setenv("COLUMNS", "80")
    narrow = l2r("report", six[0].path.parent).out.split("Downstream accuracy")[1]
    assert "* at chance" in narrow and "more columns: " in narrow and "SocSci" in narrow
    assert "See the page." in narrow
    assert {"43.8±1.0", "65.4±1.0", "56.2±2.2*"} & set(narrow.split())  # Overall is kept whole
    asked = l2r("report", six[0].path.parent, "--json")
    assert len(json.loads(asked.out)) == len(ROUTERS)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_eval_prints_every_column_or_names_it(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    values = {column: (40.0 + n, 38.5, 52.5) for n, column in enumerate(TASK_COLUMNS)}
    pair = dict.fromkeys(TASK_COLUMNS, (0.01, -0.01, 0.03))
    rows = {"linear": values, "l2r-sips": values}
    table = downstream_table(TASK_COLUMNS, rows, {"l2r-sips - linear": pair})
    print_table(table, max_columns=len(table.columns))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines)
    said = " ".join(lines)
    shown = [c for n, c in enumerate(TASK_COLUMNS) if f" {40 + n}.0" in said]
    left = re.search(r"(\d+) more columns?: ([^.]*)\.", said)
    named = left[2].split(", ") if left else []
    assert sorted([*shown, *named]) == sorted(TASK_COLUMNS)
    assert {"Overall", "MMLU"} <= set(shown)
    if width >= 100:
        assert not named
