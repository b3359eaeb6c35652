"""The commands as a person types them: what they write, and one line for bad input."""

import json
import os
import subprocess
import sys

import pytest
from typer.main import get_command

from l2r.files.folder import find_runs
from l2r.files.shapes import misshapen


def assert_refused(result, *words):
    line = result.refusal()
    for word in words:
        assert word in line, line


EVERY = ["linear", "linear_sips", "xmoe", "l2r_dot", "l2r_cosine", "l2r_sips", "l2r_sips_tuned"]


@pytest.mark.parametrize(
    "routers",
    [["linear", "l2r_sips"], pytest.param(EVERY, marks=pytest.mark.slow("seven trainings"))],
    ids=["two", "every"],
)
@pytest.mark.usefixtures("coarse")
def test_compare_trains_every_router_and_writes_one_self_contained_page(
    l2r, tiny_changes, tmp_path, routers
):
    chosen = [] if routers == EVERY else ["--routers", ",".join(routers)]
    command = ["compare", "demo", *tiny_changes, *chosen, "--out", tmp_path]
    code, out, err = l2r(*command, "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert [row["router"] for row in rows] == routers
    for row in rows:
        assert row["CE mean"] > 0 and 0 <= row["stability"] <= 1 and row["router params"] > 0
    page = (tmp_path / "report.html").read_text()
    assert str(tmp_path / "report.html") in err
    grown = [f"report.html shows {n} of {len(routers)} runs" in err for n in range(1, len(routers))]
    assert all(grown) and "open it" in err, err
    for words in ("Training cross-entropy", "Expert usage by layer", "Expert usage by domain"):
        assert words in page
    assert page.count("plotly.js v") >= 1 and "<script src=" not in page
    # The text comes first, with words of the held-out files.
    assert page.index("report-text.html") < page.index(">Routers compared<")
    text = (tmp_path / "report-text.html").read_text()
    assert "<script src=" not in text and '"name":"l2r_sips"' in text and "animals" in text
    (tmp_path / "linear" / "text.npz").unlink()  # as in a run that an older version diagnosed
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/model/model.safetensors")}
    assert l2r(*command)[0] == 0
    assert before == {p: p.stat().st_mtime_ns for p in before}
    assert (tmp_path / "linear" / "text.npz").is_file()
    code, out, _ = l2r("report", tmp_path, "--json", "--out", tmp_path / "again.html")
    assert code == 0 and json.loads(out) == json.loads(json.dumps(rows))
    assert [file for run in find_runs(tmp_path) for file in misshapen(run)] == []


def test_train_show_prints_every_field_and_list_every_recipe(l2r):
    code, out, _ = l2r("train", "demo/l2r-sips", "router.rank=8", "--show")
    assert code == 0 and "rank: 8" in out and "balance_scope: microbatch" in out
    code, out, _ = l2r("train", "--list")
    assert code == 0 and "demo/l2r-sips" in out and "olmoe-1b-7b/l2r-sips-heads-64" in out


def test_params_prints_the_papers_table(l2r):
    code, out, _ = l2r("params", "--json")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 5 and rows[0]["16"] == "131.072K (6.25%)"


def test_params_says_where_a_router_is_larger_than_the_linear_one(l2r):
    """Per layer 8 x 128 + 128 + 16 x 16 x 8 against 16 x 128: the demo's sizes."""
    demo = ["params", "--hidden-size", 128, "--num-experts", 16, "--num-layers", 1]
    words = "above 100% a router has more parameters than the linear one in its place"
    larger = l2r(*demo, "--ranks", "2,8", "--heads", 16).out
    assert "3.200K (156.25%)" in larger and words in " ".join(larger.split())
    assert words not in " ".join(l2r(*demo, "--ranks", 2, "--heads", "1,16").out.split())


def test_params_prints_the_cost_of_a_token(l2r):
    code, out, _ = l2r("params", "--cost", "--ranks", 2, "--heads", "1,16", "--json")
    assert code == 0
    (row,) = json.loads(out)  # 16 (2048 x 2 + 64 H x 2) of 16 x 2048 x 64
    assert row["1"] == "67.584K (3.22%)" and row["16"] == "98.304K (4.69%)"
    assert_refused(l2r("params", "--cost", "--vit"), "without vit and recipes")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "demo/l2r-sip"], ["unknown recipe", "demo/l2r-sips"]),
        (["train", "demo"], ["is a folder of recipes", "demo/l2r-sips"]),
        (["train"], ["RECIPE is missing"]),
        (["train", "demo/l2r-sips", "router.kind=l2r_sip"], ["unknown router", "l2r_sips"]),
        (["train", "demo/l2r-sips", "router.rank=0"], ["rank must be >= 1", "rank=0"]),
        (["train", "demo/l2r-sips", "router.rnk=2"], ["no option 'rnk'", "'rank'"]),
        (
            ["train", "demo/l2r-sips", "model.num_experts_per_tok=99"],
            ["num_experts_per_tok must be <= num_experts"],
        ),
        (["train", "demo/l2r-sips", "training.stps=5"], ["unknown field training.stps", "'steps'"]),
        (["train", "demo/l2r-sips", "trainig.steps=5"], ["unknown field trainig", "'training'"]),
        (["train", "demo/l2r-sips", "training.steps=x"], ["training.steps", "'x'"]),
        (["train", "demo/l2r-sips", "nonsense"], ["key.sub=value", "'nonsense'"]),
        (["train", "demo/l2r-sips", "seed.sub=1"], ["seed holds a value"]),
        (["train", "missing.yaml"], ["missing.yaml does not exist"]),
        (["train", "../../etc/passwd"], ["unknown recipe"]),
        (["compare", "demos"], ["unknown recipe folder 'demos' (did you mean 'demo'?)"]),
        (["compare", "demo", "--routers", "linear,cubic"], ["'cubic'"]),
        (["report", "nowhere"], ["nowhere is not a run folder"]),
        (["params", "--ranks", "2,x"], ["ranks must be positive integers"]),
        (["params", "--num-layers", "0"], ["--num-layers", "greater than or equal to 1"]),
        (["params", "--hidden-size", "9" * 20], ["must be at most 281,474,976,710,656"]),
        (["params", "--heads", "9" * 20], ["must be at most 281,474,976,710,656"]),
        (["params", "--num-experts", "9" * 20, "--cost"], ["must be at most"]),
        (
            ["params", "--num-experts", "1", "--hidden-size", 2**47, "--ranks", 2**40],
            ["rank x hidden_size must be at most 281,474,976,710,656"],
        ),
        (["landscape", "--reach", "1e300"], ["--reach must be between 0.001 and 1e+06"]),
        (["landscape", "--reach", "nan"], ["--reach must be between"]),
        (["train", "demo/l2r-sips", "--nonsense"], ["No such option"]),
        (["fly"], ["No such command"]),
        (["bench", "inference", "--seconds", "nan"], ["--seconds must be > 0 and finite"]),
        (
            ["evidence", "new", "p.yaml", "--arm", "a", "--arm", "b", "--first-seed", 2**62],
            ["--first-seed", "less than or equal to"],
        ),
        (["evidence", "new", "p.yaml", "--arm", "a", "--arm", "b", "--sd", "inf"], ["sd must be"]),
        (["swap", "nowhere", "--fit", "--tokens", -5], ["--tokens must look like", "'-5'"]),
        (["swap", "nowhere", "--fit", "--held-out", 0], ["--held-out", "than or equal to 1"]),
        (
            ["swap", "nowhere", "--fit", "--data", "none"],
            ["--data must be a file or a folder that exists"],
        ),
        (["swap", "nowhere", "--out", "n", "--lr", 1], ["--lr is for a fit; give --fit too"]),
        (["swap", "nowhere", "--out", "n", "--layers", "x"], ["--layers must be 'all' or indices"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, words, l2r, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = l2r(*args)
    assert code == 2 and list(tmp_path.iterdir()) == []
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, err


def test_empty_corpus_folder_and_unwritable_output(l2r, tiny_changes, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    changes = [*tiny_changes, f"data.corpus={empty}"]
    out = tmp_path / "run"
    assert_refused(
        l2r("train", "demo/linear", *changes, "--out", out), "must hold text files", str(empty)
    )
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert_refused(
        l2r("train", "demo/linear", *tiny_changes, "--out", blocked / "run"),
        f"cannot use {blocked}: not a directory",
    )


def test_a_yaml_file_that_is_not_a_mapping_or_runs_code_is_refused(l2r, tmp_path):
    for text in ("- 1\n- 2\n", "a: [", "seed: !!python/object/apply:os.system ['echo hi']"):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        assert_refused(l2r("train", path), "recipe", "recipe.yaml")
    path.write_text(f"base: {path}\n")
    assert_refused(l2r("train", path), "its own base")


@pytest.mark.slow("a fresh process")
def test_a_real_process_ends_with_code_2_and_one_line(tmp_path):
    command = [sys.executable, "-m", "l2r", "train", "demo/l2r-sips", "router.rank=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and len(done.stderr.strip().splitlines()) == 1


def test_transformers_bars_and_notices_stay_away_from_every_command(monkeypatch, l2r):
    from transformers.utils import logging

    names = ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert l2r("--version").code == 0
    assert [os.environ[name] for name in names] == ["1", "error"]
    assert not logging.is_progress_bar_enabled()  # asked before the first import, by conftest.py
    assert logging.get_verbosity() == logging.ERROR


def test_every_command_has_help_with_an_example(l2r):
    from l2r.cli.app import PANELS

    for name in (name for names in PANELS.values() for name in names):
        code, out, _ = l2r(name, "--help")
        assert code == 0 and "Example" in out, name


def test_no_bracket_of_a_help_text_is_taken_for_markup():
    from l2r.cli.app import build_app

    commands, seen = [get_command(build_app())], 0
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        for text in [command.help, *(getattr(p, "help", None) for p in command.params)]:
            assert "[" not in (text or ""), (command.name, text)
            seen += 1
    assert seen > 50


def test_router_options_of_a_wrong_type_are_named(tmp_path):
    """In this process annotations are checked by the test hook, so a real one is asked."""
    cases = {
        "kind: l2r_sips, rank: two": "rank must be of type int; got rank='two'",
        "kind: xmoe, gate: relu": "gate must be softmax or sigmoid; got gate='relu'",
        "kind: l2r_dot, query_norm: 2": "query_norm must be rmsnorm, batchnorm or none; got",
    }
    script = "import sys, yaml; from l2r.routers import RouterConfig as R\n"
    script += "for line in sys.stdin:\n try: R.from_dict(yaml.safe_load(line))\n"
    script += " except ValueError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        input="\n".join(f"{{{case}}}" for case in cases),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases), done.stderr
    for line, words in zip(lines, cases.values(), strict=True):
        assert words in line
