"""What a terminal of 80 characters shows of every command, and how commands are asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from l2r.imports import MissingExtraError
from l2r.report.tables import Table
from tests.report.runs import made_run

RESULTS = Path(__file__).parents[2] / "results" / "evidence"


@pytest.fixture
def narrow(l2r, tmp_path, monkeypatch):
    """The lines that a command prints, in a terminal of 80 characters; none is cut or wider."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def run(*args):
        code, out, err = l2r(*args)
        assert code == 0, err
        lines = out.splitlines()
        rules = [line for line in lines if set(line.strip()) == {"─"}]
        assert rules and "…" not in out, out
        for line in lines:
            assert len(line) <= 80 or str(tmp_path) in line, (len(line), line)
        return lines

    return run


@pytest.mark.parametrize(
    "command",
    [
        ("params",),
        ("params", "--heads", "1,2,4,8,16,32,64"),
        pytest.param(("params", "--vit"), marks=pytest.mark.slow("whole models are counted")),
        ("params", "--recipes", "demo"),
        ("plan", "olmoe-1b-7b/l2r-sips", "--no-simulate"),
        ("doctor",),
        ("data", "plan"),
        ("bench", "inference", "--size", "tiny", "--seconds", 0.01),
        ("evidence", "decision", "--judge-only", "--results", RESULTS),
        ("evidence", "screen", "--judge-only", "--results", RESULTS),
    ],
    ids=lambda command: " ".join(map(str, command[:2])),
)
def test_a_table_fits_80_characters(command, narrow):
    narrow(*command)


@pytest.mark.slow("a chain of commands")
def test_tables_of_runs_and_checkpoints_fit_80_characters(narrow, tiny_changes, text_folder):
    """Train, compare, report, sweep, diagnose, swap, fit and eval, in the smallest sizes."""
    routers = ("--routers", "linear,l2r-sips")
    first = narrow("compare", "demo", *tiny_changes, *routers)
    assert first[0].startswith("One seed ranks nothing: validation CE runs from")
    pages = [line.removeprefix("page: ") for line in first if line.startswith("page: ")]
    assert pages == ["runs/demo/report.html", "runs/demo/report-text.html"]
    assert all(Path(page).is_file() for page in pages)
    narrow("report", "runs/demo")
    again = narrow("compare", "demo", *tiny_changes, *routers, "--seeds", 2)
    assert " ".join(again).startswith("Validation CE against linear over 2 seeds: ")
    grid = ("--grid", "router.rank=2,4", "--no-usage")
    assert narrow("sweep", "demo/l2r_sips", *grid, *tiny_changes)[0].startswith("One seed ranks")
    few = ("--instances", 4, "--length", 16, "--certify", 2, "--gain", 2, "--sample", 32)
    text = ("--data", text_folder)
    narrow("diagnose", "runs/demo/linear", "runs/demo/l2r_sips", *few, *text)
    narrow("swap", "runs/demo/linear", "--out", "swapped")
    small = ("--tokens", 400, "--held-out", 200, "--length", 16, "--updates", 1)
    narrow("swap", "runs/demo/linear", "--fit", *small, *text)
    narrow(
        "eval",
        "runs/demo/linear",
        "runs/demo/l2r_sips",
        "--data",
        text_folder / "animals" / "0.txt",
    )


def test_a_table_in_brief_keeps_the_columns_that_matter():
    columns = ("name", *"abcdefgh")
    rows = (("x", None, 0.123456, 2, 3, 4, 5, 6, 7), ("y", None, 1.0, 2, 3, 4, 5, 6, 7))
    brief = Table("t", columns, rows, "what a is", few=("a", "h", "b", "c", "d", "e", "f")).brief()
    assert brief.columns == ("name", "b", "c", "d", "e", "h")  # a holds nothing
    assert brief.rows[0] == ("x", 0.123456, 2, 3, 4, 7) and brief.show(0.123456) == "0.123"
    assert brief.caption == "2 more columns: f, g. See --json."  # a holds nothing
    whole = Table("t", columns[:4], tuple(row[:4] for row in rows), "what a is").brief()
    assert whole.columns == columns[:4] and whole.caption == "what a is"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "demo/l2r-sips", "rank=8"], ["unknown field rank", "'router.rank'"]),
        (["sweep", "demo/l2r-sips", "--grid", "rank=2,8"], ["unknown field rank", "'router.rank'"]),
        (["train", "demo/l2r-sips", "steps=8"], ["'training.steps'"]),
        (["train", "demo/l2r-sips", "--otu", "x"], ["--otu", "--out"]),
        (["diagno"], ["'diagnose'"]),
        (["data", "tokenizer", "--data", ".", "--out", "."], ["error: --out must be a new folder"]),
        (["landscape", "--layers", "3"], ["error: --layers are read only with a checkpoint"]),
        (["params", "--ranks", "x"], ["error: --ranks must be"]),
        (["eval", "x", "--device", "gpu0"], ["error: --device must be auto, cpu, cuda or cuda:0"]),
        (["serve", "x", "--device", "meta"], ["error: --device must be auto, cpu, cuda or cuda:0"]),
    ],
)
def test_the_nearest_right_name_or_the_option_is_in_the_message(
    args, words, l2r, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    line = l2r(*args).refusal()
    for word in words:
        assert word in line, line


def test_the_other_spelling_of_a_recipe_and_of_a_router_is_the_same_recipe(l2r):
    shown = l2r("train", "demo/l2r-sips", "--show").out
    assert l2r("train", "demo/l2r_sips", "--show").out == shown
    dots = l2r("train", "demo/l2r-sips", "router.kind=l2r_dot", "--show").out
    assert "kind: l2r_dot" in dots
    assert l2r("train", "demo/l2r-sips", "router.kind=l2r-dot", "--show").out == dots


def test_short_help_panels_and_completion(l2r):
    code, out, _ = l2r("-h")
    assert code == 0
    places = [out.index(f"─ {panel} ") for panel in ("Inspect", "Change", "Train", "Study")]
    assert places == sorted(places) and out.index("diagnose") < out.index("swap")
    assert l2r("swap", "-h").out == l2r("swap", "--help").out
    asked = {"_L2R_COMPLETE": "complete_bash", "COMP_WORDS": "l2r di", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from l2r.cli import main; main()"],
        env={**os.environ, **asked}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["diagnose"], done.stderr


def test_open_shows_the_first_page_in_the_browser(l2r, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    made_run(tmp_path / "linear")
    code, out, _ = l2r("report", tmp_path, "--open")
    assert code == 0 and opened == [(tmp_path / "report.html").as_uri()]
    assert out.count(str(tmp_path / "report.html")) == 1


def test_a_missing_extra_is_one_line(l2r, monkeypatch):
    def missing(*_, **__):
        raise MissingExtraError(
            "l2r.hf needs transformers; none is installed: pip install l2r-moe[lm]"
        )

    monkeypatch.setattr("l2r.hf.checkpoints.local_checkpoint", missing)
    assert "l2r.hf needs transformers" in l2r("mismatch", "x", "--against", "bf16").refusal()
