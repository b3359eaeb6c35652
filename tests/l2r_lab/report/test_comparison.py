"""The comparison of runs: at equal amounts of training or not at all."""

import re

import numpy as np
import pytest

from l2r.files.diagnosis import USAGE, Diagnosis
from l2r.files.folder import RunFolder
from l2r_lab.report.comparison import (
    PANELS,
    accuracy_over_seeds,
    comparison_table,
    first_seeds,
    in_paper_order,
    write_report,
)
from l2r_lab.report.curves import curve_sections
from tests.report.pages import made_diagnosis
from tests.report.runs import PER_STEP, bold, made_run
from tests.report.texts import random_text


@pytest.fixture
def ended(tmp_path):
    """Two runs of 120 steps that ended."""
    return [made_run(tmp_path / n, ce=ce) for n, ce in (("dot", 5.9533), ("xmoe", 5.9787))]


def rows(table):
    return {row["router"]: row for row in table.records()}


def test_an_unfinished_run_stands_with_its_step_and_without_results(ended, tmp_path):
    """Its last validation is of step 60: no number to set beside those of step 120."""
    late = made_run(tmp_path / "linear", ce=5.0, until=110, router_parameters=1)
    table = comparison_table([late, *ended])
    found = rows(table)
    assert {name: row["steps"] for name, row in found.items()} == {
        "linear": "110 of 120",
        "dot": 120,
        "xmoe": 120,
    }
    assert found["linear"]["CE mean"] is None and found["linear"]["balance loss"] is None
    assert found["dot"]["CE mean"] == 5.9533 and found["dot"]["balance loss"] == 115.0
    assert "Unfinished, so without results: linear." in table.caption
    assert bold(table) == {}  # one seed ranks nothing


def test_unfinished_runs_are_compared_at_the_last_place_that_all_have_validated(tmp_path):
    runs = [made_run(tmp_path / f"to-{n}", ce=5.0, until=n, every=30) for n in (110, 70, 90)]
    table = comparison_table(runs)
    at_60 = [row["CE mean"] for row in table.records()]
    assert at_60 == pytest.approx([5.2] * 3)
    assert [row["balance loss"] for row in table.records()] == [60.0] * 3  # as a run of 60 steps
    assert f"No run is finished: results are those at {60 * PER_STEP:,} tokens" in table.caption
    assert bold(table) == {}


def test_unfinished_runs_that_share_no_validation_are_not_compared(tmp_path):
    runs = [made_run(tmp_path / f"every-{n}", until=70, every=n) for n in (40, 60)]
    table = comparison_table(runs)
    assert [row["CE mean"] for row in table.records()] == [None, None]
    assert "no validation at the same number of tokens" in table.caption


def test_one_run_that_goes_on_shows_its_last_validation(tmp_path):
    run = made_run(tmp_path / "linear", ce=5.0, until=110, every=30)
    (row,) = comparison_table([run]).records()
    assert row["CE mean"] == pytest.approx(5.1) and row["steps"] == "110 of 120"


def test_runs_of_different_lengths_have_their_own_ends_and_no_best(ended, tmp_path):
    longer = made_run(tmp_path / "longer", ce=5.0, steps=240)
    table = comparison_table([*ended, longer])
    assert [row["CE mean"] for row in table.records()] == [5.9533, 5.9787, 5.0]
    assert bold(table) == {}
    assert "Runs saw from 61,440 to 122,880 tokens: they are not comparable." in table.caption


@pytest.mark.parametrize(
    ("budget", "data"),
    [
        ({"tokens": 120 * PER_STEP + 200}, {}),
        ({"epochs": 2.0}, {"train_tokens": 60 * PER_STEP + 500}),
    ],
)
def test_the_planned_steps_follow_from_a_budget_of_tokens_or_epochs(tmp_path, budget, data):
    training = {"steps": None, **budget}
    runs = [
        made_run(tmp_path / f"{n}", until=n, training=training, data=data, every=10)
        for n in (110, 120)
    ]
    assert [row["steps"] for row in comparison_table(runs).records()] == ["110 of 120", 120]


def test_a_run_whose_plan_is_unknown_is_finished_when_its_weights_are_there(tmp_path):
    training = {"steps": None, "epochs": 1.0}  # of data whose size an old run does not say
    runs = [made_run(tmp_path / f"{n}", until=n, training=training) for n in (110, 120)]
    steps = [row["steps"] for row in comparison_table(runs).records()]
    assert steps == ["110 of ?", 120]


def test_columns_are_those_of_every_run(ended, tmp_path):
    first = made_run(tmp_path / "first", until=10)
    assert rows(comparison_table([first, *ended]))["dot"]["CE mean"] == 5.9533


def test_the_page_says_what_each_run_saw_and_has(ended, tmp_path):
    _, (page, *_) = write_report(ended, tmp_path / "page.html")
    assert "2 run(s) of a model with 1,000 parameters, 61,440 tokens each." in page.read_text()
    others = [
        made_run(tmp_path / "linear", until=110),
        made_run(tmp_path / "wide", parameters=2500),
    ]
    _, (page, *_) = write_report([*others, *ended], tmp_path / "page.html")
    text = page.read_text()
    assert "4 run(s) of a model with 1,000 to 2,500 parameters, 56,320 to 61,440 tokens each." in (
        text
    )
    assert "Unfinished: linear (step 110 of 120)." in text


def test_the_same_batches_are_claimed_of_runs_of_one_recipe_only(ended, tmp_path):
    words = "sees the same batches"
    _, (page, *_) = write_report(ended, tmp_path / "page.html")
    assert words in page.read_text()
    other = made_run(tmp_path / "other", seed=1)
    _, (page, *_) = write_report([*ended, other], tmp_path / "page.html")
    assert words not in page.read_text()


def test_the_table_says_how_to_fill_the_columns_of_routing(ended, tmp_path):
    table = comparison_table(ended)
    names = f"{tmp_path / 'dot'} {tmp_path / 'xmoe'}"
    assert f"l2r diagnose {names} --out {tmp_path}` fills the columns" in table.caption
    layer = {"mean_margin": 0.5, "name": "layers.0.gate"}
    arrays = {f"0.{kind}": np.ones(1) for kind in USAGE}
    for run in ended:
        Diagnosis({"domains": ["a"]}, [layer], arrays).save(run.path)
    assert "l2r diagnose" not in comparison_table(ended).caption


def test_the_first_screen_is_the_verdict_the_text_and_a_table_of_eight_columns(ended, tmp_path):
    for number, run in enumerate(ended):
        random_text(seed=number).save(run.text)
        made_diagnosis(number).save(run.path)
    _, (page, text) = write_report(ended, tmp_path / "page.html")
    whole = page.read_text()
    body = whole[whole.index("<h1") :]
    first = body[: body.index("class='cannot'")]
    assert first.count("<figcaption>") == 2 and "<figcaption>dot, layer 1" in first
    assert f"href='{text.name}'" in first
    (head,) = re.findall(r"<thead>(.*?)</thead>", first)
    assert 2 < head.count("<th") <= 8
    cells = re.findall(r"<td[^>]*>([^<]*)", first)
    assert "5.953" in cells and not any(re.fullmatch(r"-?\d+\.\d{4,}", cell) for cell in cells)
    after = body[len(first) :]
    assert "class='js-plotly" not in after.partition("<details")[0] and "<details" in after
    assert after.count("<h2") == after.count("<details")  # all else is folded


def test_of_many_texts_the_first_the_lowest_and_the_highest_loss_are_shown(tmp_path):
    losses = {"linear": 5.5, "xmoe": 5.9, "l2r_dot": 5.6, "l2r_sips": 5.1}
    runs = [made_run(tmp_path / name, ce=ce) for name, ce in losses.items()]
    for run in runs:
        random_text().save(run.text)
    _, (page, _) = write_report(runs, tmp_path / "page.html")
    shown = re.findall(r"<figcaption>(\w+)", page.read_text())
    assert shown == ["linear", "xmoe", "l2r_sips"]
    assert "Open the whole text of 4 routers" in page.read_text()


def test_what_was_measured_once_is_a_number_and_no_curve(tmp_path):
    run = made_run(tmp_path / "linear", every=120, ce=5.75)
    (section,) = curve_sections("Training", "", {"linear": [run]}, PANELS["tokens"], "tokens")
    figure, table = section.parts
    assert [note.text for note in figure.layout.annotations] == [
        "Training cross-entropy of every step", "Load-balance loss, mean of layers",
    ]  # fmt: skip
    assert table.records() == [{"run": "linear", "Validation cross-entropy, mean of domains": 5.75}]


def test_unfinished_runs_are_no_seeds_of_an_accuracy(tmp_path):
    def accuracy(step):
        return {"top1": step / 200, "top5": step / 150}

    for name, until in (("linear", 120), ("linear.seed-1", 120), ("linear.seed-2", 70)):
        made_run(tmp_path / name, until=until, validation=accuracy)
    late = made_run(tmp_path / "xmoe", until=110, validation=accuracy)
    runs = [RunFolder(path) for path in sorted(tmp_path.iterdir())]
    (table,) = accuracy_over_seeds(runs)
    (row,) = table.records()
    assert row["seeds"] == 2 and row["Top-1 (%)"] == pytest.approx(60.0)
    assert "Unfinished and not counted: linear.seed-2, xmoe." in table.caption
    assert accuracy_over_seeds([late]) == []


def test_repeats_have_no_row_unless_all_runs_of_an_arm_are_repeats(tmp_path):
    names = ("linear", "linear.seed-1", "xmoe.seed-2")
    runs = [RunFolder(tmp_path / name) for name in names]
    assert [run.name for run in first_seeds(runs)] == ["linear", "xmoe.seed-2"]
    assert first_seeds(runs[1:]) == runs[1:]


def test_runs_named_after_routers_come_in_the_papers_order_and_others_by_name(tmp_path):
    for mark in ("", ".seed-0"):
        names = [f"{name}{mark}" for name in ("zeta", "l2r-sips", "alpha", "linear")]
        runs = in_paper_order([RunFolder(tmp_path / name) for name in names])
        order = [run.name.removesuffix(mark) for run in runs]
        assert order == ["linear", "l2r-sips", "alpha", "zeta"]
