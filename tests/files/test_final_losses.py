"""What a run ends with, and how far it is, by its records."""

import pytest

from l2r.files.final_losses import final_losses, last_tenth, late_losses
from l2r.files.folder import RunFolder
from l2r_lab.files.progress import read_progress
from tests.report.runs import PER_STEP, made_run


def test_the_last_validation_is_the_end_and_the_mean_of_domains_comes_before_their_sum(tmp_path):
    run = made_run(tmp_path / "run", ce=5.0)
    losses = final_losses(run)
    assert losses == {"train_ce": 6.0, "validation_ce": 5.0, "balance": pytest.approx(115.0)}
    place = {"kind": "validation", "step": 120, "tokens": 1}
    run.append_metrics({**place, "ce": 9.0})
    assert final_losses(run)["validation_ce"] == 9.0  # as image classifiers have it
    run.append_metrics({**place, "ce": 9.0, "ce/mean": 8.0})
    assert final_losses(run)["validation_ce"] == 8.0
    assert final_losses(RunFolder(tmp_path / "none")) == {}


def test_the_last_tenth_is_that_of_the_steps_up_to_an_end(tmp_path):
    run = made_run(tmp_path / "run", steps=200)
    assert last_tenth(run, "balance") == 195.0  # of 190 and 200; 180 is not in it
    assert last_tenth(run, "balance", end=100) == 100.0  # 90 is 0.9 of it
    assert last_tenth(run, "balance", end=109) == 100.0
    assert last_tenth(run, "balance", end=9) is None


def test_the_last_tenth_counts_every_step_of_its_records(tmp_path):
    """A run that was stopped logged its last tenth in unequal parts."""
    run = RunFolder(tmp_path / "run")
    run.create()
    for step, steps, ce in ((90, 10, 9.0), (97, 7, 3.0), (98, 1, 5.0), (100, 2, 1.0)):
        run.append_metrics({"kind": "train_mean", "step": step, "steps": steps, "ce": ce})
    assert last_tenth(run, "ce") == 2.8
    assert last_tenth(run, "ce", end=98) == (90 + 21 + 5) / 18


def test_the_late_quarters_count_every_step_of_their_records(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    for step, steps, ce in ((4, 4, 9.0), (5, 1, 4.0), (6, 1, 2.0), (7, 1, 2.0), (8, 1, 1.0)):
        run.append_metrics({"kind": "train_mean", "step": step, "steps": steps, "ce": ce})
    assert late_losses(run) == {
        "train_ce_third_quarter": 3.0,  # of steps 5 and 6
        "train_ce_last_quarter": 1.5,
        "train_ce_late_change": -1.5,
    }
    short = RunFolder(tmp_path / "short")
    short.create()
    short.append_metrics({"kind": "train_mean", "step": 8, "steps": 8, "ce": 9.0})
    assert late_losses(short) == late_losses(RunFolder(tmp_path / "none")) == {}


def test_progress_is_of_the_last_record_and_the_plan(tmp_path):
    going = read_progress(made_run(tmp_path / "going", until=70))
    assert going == (70, 120, "tokens", 70 * PER_STEP, False) and str(going) == "70 of 120"
    ended = read_progress(made_run(tmp_path / "ended"))
    assert ended == (120, 120, "tokens", 120 * PER_STEP, True)
    empty = RunFolder(tmp_path / "empty")
    assert read_progress(empty) == (0, None, "tokens", 0, False)


def test_records_that_were_cut_are_of_no_end_although_the_weights_are_there(tmp_path):
    run = made_run(tmp_path / "run")
    run.cut_metrics(60)
    assert run.is_finished() and not read_progress(run).ended


def test_a_damaged_recipe_is_one_line(tmp_path):
    run = made_run(tmp_path / "run")
    for text, words in (("a: [", "is not valid YAML"), ("- a", "must be a mapping of fields")):
        run.recipe.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_progress(run)
