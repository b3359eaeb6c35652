"""Studies: cells run once, survive kills and fit into hours; verdicts and pages from results."""

import dataclasses
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml

from l2r.cli import main
from l2r.files.folder import RunFolder
from l2r_lab.files.study import LOSSES, MEASURES, OF_TEXT, StudyResults
from l2r_lab.report.evidence import write_study
from l2r_lab.report.evidence_figures import curves_with_bands, effect_plot
from l2r_lab.report.evidence_scales import size_plot
from l2r_lab.report.screen_effects import effects_by_screen
from l2r_lab.report.study_verdict import of_study
from l2r_lab.studies import judging, measure, registration
from l2r_lab.studies import train_cells as running
from l2r_lab.studies.judging import StudyPlaces, judge_plan, results_of, seeds_that_fit, study_of
from l2r_lab.studies.plan_runs import Budget, _curve, run_plan, run_share
from l2r_lab.studies.registration import RegisteredPlan, read_plan
from l2r_lab.studies.running import Ended, run_processes
from l2r_lab.studies.study_plan import StudyPlan
from l2r_lab.training import build_task, loop
from tests.l2r_lab.studies.studies import SMALL, made_up

SCREEN = {
    "l2r": {
        "changes": ["router.kind=l2r_sips"],
        "factors": {
            "gamma": {"1": "router.gamma=1.0", "2": "router.gamma=2.0"},
            "z": {"paper": "losses.z=0.001", "none": "losses.z=0"},
        },
        "interactions": [["gamma", "z"]],
        "cells": [["1", "paper"], ["1", "none"], ["2", "paper"], ["2", "none"]],
    }
}


def registered(**changes):
    return RegisteredPlan(
        StudyPlan.model_validate({**SMALL, **changes}), "small", "d", "c", "registered"
    )


def plan_of(changes, **others):
    """The small plan at the size of the tests."""
    fixed = ("training.steps", "training.log_every", "evaluation.every", "checkpoint")
    small = [c for c in changes if not c.startswith((*fixed, "evaluation"))]
    small += ["evaluation.batch_size=16", "evaluation.max_batches=2"]
    return {**SMALL, "changes": small, "sample": 512, **others}


def values(gap=0.0, before=0.0):
    """Measures that differ between the arms by ``gap`` after training and ``before`` before it."""

    def value(arm, seed, metric, trained):
        noise = 0.001 * ((seed * 7919 + len(arm) * (seed + 1)) % 5)
        shift = (gap if trained else before) if arm == "l2r" else 0.0
        return 5 + seed + noise + shift

    return value


@pytest.mark.slow("whole trainings")
def test_a_share_is_measured_once_and_goes_on_after_a_failure(tiny_changes, tmp_path, monkeypatch):
    plan = RegisteredPlan(
        StudyPlan.model_validate(plan_of(tiny_changes)), "small", "d", "c", "registered"
    )
    places, cells = StudyPlaces(tmp_path / "results", tmp_path / "runs"), plan.plan.cells(1)
    trained = []

    def train(recipe, folder, **options):
        trained.append(Path(folder).name)
        if trained == ["linear.seed-0", "l2r.seed-0"]:
            raise torch.OutOfMemoryError("out of memory")
        return loop.train(recipe, folder, **options)

    monkeypatch.setattr(running, "train", train)
    lines = []
    assert run_share(plan, cells, places, report=lines.append) == (1, None)
    assert "failed: l2r.seed-0: out of memory" in lines
    assert run_share(plan, cells, places) == (0, None)
    assert trained == [c.name for c in cells] + ["l2r.seed-0"]
    assert run_share(plan, cells, places) == (0, None) and len(trained) == 3
    assert [p.name for p in places.runs.iterdir()] == [".claims"]  # runs go, results stay

    results = results_of(plan, cells, places)
    assert [(r.arm, r.seed) for r in results] == [(c.arm, c.recipe.seed) for c in cells]
    for result in results:
        assert set(result.trained) == {*MEASURES, *OF_TEXT}  # too short for quarters
        assert set(result.untrained) == set(MEASURES)
        assert all(math.isfinite(value) for value in result.trained.values())
        assert result.trained["bf16_flipped_tokens"] == result.trained["flipped_tokens"]
        assert set(result.facts["source"]) == {"tree", "changed"}
        assert result.plan == {"name": "small", "digest": "d", "commit": "c"}
        assert result.facts["steps"] == 8
        assert result.untrained["validation_ce"] == pytest.approx(5.7, abs=0.3)  # log 300
        assert result.trained["validation_ce"] < result.untrained["validation_ce"]
    assert places.stored().path.stat().st_size < 10_000
    judged = judge_plan(plan.plan, results)
    assert [(j.seeds, j.verdict) for j in judged] == [(1, "no verdict")] * 2


@pytest.mark.slow("whole trainings")
def test_an_untrained_model_makes_no_contrast_better(tiny_changes, tmp_path):
    """At a rate of 1e-12 every measure of the weights is that of step 0, and no verdict is won.

    By the rule on losses alone, none of a loss is.
    """
    better = {"larger": ("routing_gain", "load_entropy", "stability", "cosine_variance")}
    metrics = [m for m in MEASURES if m != "balance"]
    contrasts = [
        {
            "first": first,
            "second": second,
            "metric": metric,
            "better": "larger" if metric in better["larger"] else "smaller",
        }
        for metric in metrics
        for first, second in (("l2r", "linear"), ("linear", "l2r"))
    ]
    changes = plan_of(tiny_changes, tokens=256, contrasts=contrasts)
    changes["changes"] = [*changes["changes"], "optimizer.lr=1e-12"]
    plan = RegisteredPlan(StudyPlan.model_validate(changes), "small", "d", "c", "registered")
    places, cells = StudyPlaces(tmp_path / "results", tmp_path / "runs"), plan.plan.cells(2)
    assert run_share(plan, cells, places) == (0, None)
    results = results_of(plan, cells, places)
    for result in results:
        of_weights = [m for m in metrics if m != "train_ce"]
        sides = ([side[m] for m in of_weights] for side in (result.trained, result.untrained))
        assert next(sides) == pytest.approx(next(sides), rel=1e-6, abs=1e-6)
    of_all = plan.plan.model_copy(update={"added_by_training": "all"})
    for rule, judged in ((plan.plan, LOSSES), (of_all, metrics)):
        found = {(j.contrast.metric, j.verdict) for j in judge_plan(rule, results)}
        verdicts = {verdict for metric, verdict in found if metric in judged}
        assert verdicts <= {"no verdict", "equivalent"}, found


def test_a_cell_that_another_process_holds_is_left_to_it(tiny_changes, tmp_path):
    plan = RegisteredPlan(
        StudyPlan.model_validate(plan_of(tiny_changes)), "small", "d", "c", "registered"
    )
    places, cells = StudyPlaces(tmp_path / "results", tmp_path / "runs"), plan.plan.cells(2)[:1]
    claim = places.runs / ".claims" / cells[0].name
    claim.parent.mkdir(parents=True)
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(claim)], **pipe) as other:
        assert other.stdout.readline() == "held\n"
        assert run_share(plan, cells, places) == (0, None) and not places.results.exists()
        other.kill()
    assert run_share(plan, cells, places, limit=0) == (0, None)
    assert not places.results.exists()


def stopped_in_step(number, monkeypatch):
    """Steps as they are taken; SIGTERM comes in the one of this number, counted from 1."""
    steps = []

    def watch(step):
        steps.append(step)
        if len(steps) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    def train(recipe, folder, **options):
        return loop.train(recipe, folder, on_step=watch, **options)

    monkeypatch.setattr(running, "train", train)
    return steps


def test_a_curve_counts_every_step_of_records_of_unequal_length(tmp_path):
    """A run that was stopped after its third step logged the first four in two parts."""
    run = RunFolder(tmp_path / "run")
    run.create()
    for step, steps, ce in ((3, 3, 5.0), (4, 1, 9.0), (8, 4, 2.0), (9, 1, 1.0)):
        run.append_metrics({"kind": "train_mean", "step": step, "steps": steps, "ce": ce})
    assert _curve(run, 4) == [(4, 6.0), (8, 2.0), (9, 1.0)]


@pytest.mark.slow("a training stopped twice")
def test_a_stopped_cell_goes_on_from_its_last_step(tiny_changes, tmp_path, monkeypatch):
    plan = RegisteredPlan(
        StudyPlan.model_validate(plan_of(tiny_changes)), "small", "d", "c", "registered"
    )
    places, cells = StudyPlaces(tmp_path / "results", tmp_path / "runs"), plan.plan.cells(1)[:1]
    steps = stopped_in_step(3, monkeypatch)
    assert run_share(plan, cells, places) == (0, signal.SIGTERM)
    assert not places.measured()
    assert run_share(plan, cells, places) == (0, None)
    assert steps == list(range(8))  # each once
    (result,) = results_of(plan, cells, places)
    assert result.facts["seconds"] is None  # the time of a part tells nothing of a whole cell
    whole = StudyPlaces(tmp_path / "whole", tmp_path / "whole-runs")
    assert run_share(plan, cells, whole) == (0, None)
    (other,) = results_of(plan, cells, whole)
    assert [s for s, _ in result.curve] == [s for s, _ in other.curve]
    assert [ce for _, ce in result.curve] == pytest.approx([ce for _, ce in other.curve], rel=1e-6)


@pytest.mark.slow("a whole training")
def test_a_stop_in_the_last_step_of_a_cell_stops_the_study(tiny_changes, tmp_path, monkeypatch):
    plan = RegisteredPlan(
        StudyPlan.model_validate(plan_of(tiny_changes)), "small", "d", "c", "registered"
    )
    places, cells = StudyPlaces(tmp_path / "results", tmp_path / "runs"), plan.plan.cells(1)
    steps = stopped_in_step(8, monkeypatch)
    assert run_share(plan, cells, places) == (0, signal.SIGTERM)
    assert len(steps) == 8  # the other cell was not begun
    assert run_share(plan, cells[:1], places) == (0, None)
    assert len(steps) == 8 and places.measured() == {(cells[0].arm, cells[0].recipe.seed)}


@pytest.fixture
def unmeasured(monkeypatch):
    """Cells that end without training: their names as they are run, and what is to go wrong."""
    ran, failing = [], {}

    def train_cell(cell, root, label, **_):
        ran.append(cell.name)
        run = cell.run(root)
        (run.path / "half").mkdir(parents=True)  # it exists: this one was begun before
        return failing.get(len(ran), Ended(True))

    made = dict.fromkeys(MEASURES, 1.0)
    monkeypatch.setattr("l2r_lab.studies.plan_runs.train_cell", train_cell)
    monkeypatch.setattr("l2r_lab.studies.plan_runs.measure", lambda *_: (made, made))
    monkeypatch.setattr("l2r_lab.studies.plan_runs._counts", lambda *_: {})
    monkeypatch.setattr("l2r_lab.studies.plan_runs._curve", lambda *_: [(1, 1.0)])
    return ran, failing


def test_an_interrupted_seed_is_run_again_whole(tmp_path, unmeasured):
    ran, failing = unmeasured
    plan, places = (
        registered(whole_seeds=True),
        StudyPlaces(tmp_path / "results", tmp_path / "runs"),
    )
    cells = plan.plan.cells(2)
    seeds = [[c.name for c in cells[:2]], [c.name for c in cells[2:]]]
    failing[4] = Ended(True, signal=signal.SIGTERM)  # the second arm of the second seed
    assert run_share(plan, cells, places) == (0, signal.SIGTERM)
    assert ran == [*seeds[0], *seeds[1]]
    assert {seed for _, seed in places.measured()} == {0} and len(places.measured()) == 2
    assert run_share(plan, cells, places) == (0, None)
    assert ran[4:] == seeds[1]  # whole, although its first arm had ended
    assert len(places.measured()) == 4 and len(results_of(plan, cells, places)) == 4
    assert run_share(plan, cells, places) == (0, None) and len(ran) == 6


def test_a_seed_of_which_an_arm_failed_stores_nothing_and_the_next_one_is_run(tmp_path, unmeasured):
    ran, failing = unmeasured
    plan, places = (
        registered(whole_seeds=True),
        StudyPlaces(tmp_path / "results", tmp_path / "runs"),
    )
    failing[2] = Ended(error="out of memory")  # the second arm of the first seed
    lines = []
    assert run_share(plan, plan.plan.cells(2), places, report=lines.append) == (1, None)
    assert len(ran) == 4 and "failed: l2r.seed-0: out of memory" in lines
    assert {seed for _, seed in places.measured()} == {1} and len(places.measured()) == 2


def test_a_share_of_whole_seeds_counts_seeds(tmp_path, unmeasured):
    ran, _ = unmeasured
    plan, places = (
        registered(whole_seeds=True),
        StudyPlaces(tmp_path / "results", tmp_path / "runs"),
    )
    assert run_share(plan, plan.plan.cells(2), places, limit=1) == (0, None)
    assert len(ran) == 2 and {seed for _, seed in places.measured()} == {0}


def test_part_of_a_seed_counts_for_nothing_where_seeds_are_whole(tmp_path, unmeasured):
    plan, places = (
        registered(whole_seeds=True),
        StudyPlaces(tmp_path / "results", tmp_path / "runs"),
    )
    results, cells = made_up(plan, 2, values()), plan.plan.cells(2)
    places.stored().append(*(result.rounded() for result in results[:3]))
    assert [r.seed for r in results_of(plan, cells, places)] == [0, 0]
    with pytest.raises(ValueError, match="holds 1 of 2 arms of seed-1, which is run whole or not"):
        run_share(plan, cells, places)
    assert not unmeasured[0]


@pytest.mark.parametrize(("own", "asked"), [(0, [0, 10]), (1, [0])])
def test_a_niceness_of_the_users_stays(tmp_path, monkeypatch, l2r, own, asked):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    monkeypatch.chdir(tmp_path)
    said = []
    monkeypatch.setattr("os.nice", lambda more: said.append(more) or own)
    monkeypatch.setattr("l2r_lab.studies.run_share", lambda *_, **__: (0, None), raising=False)
    assert l2r("evidence", "small.yaml", "--cells-only", 1).code == 0 and said == asked


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Processes of the command run in this one; those that were started, by their options."""
    started = []

    def run(command, processes, threads):
        started.append((command[4:], processes))
        with pytest.raises(SystemExit) as done:
            main(command[3:])
        return {1: done.value.code}, None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("l2r_lab.studies.plan_runs.run_processes", run)
    monkeypatch.setattr("os.nice", lambda more: None)
    return started


def test_the_command_runs_judges_and_then_has_nothing_left_to_run(
    tiny_changes, tmp_path, here, l2r
):
    plan = plan_of(tiny_changes)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(plan))
    done = l2r("evidence", "small.yaml", "--processes", 1, "--hours", 1, "--json")
    assert done.code == 0, done
    assert "1 hours fit 2 of at most 2 seeds here" in done.err
    assert [row["seeds"] for row in json.loads(done.out)] == [2, 2]
    assert len(here) == 2 and here[0][0][-1] == "1"  # one cell first, to time it
    folder = tmp_path / "results" / "evidence" / "small"
    assert len(StudyResults(folder).read()) == 4
    page = (tmp_path / "runs" / "evidence" / "small" / "report.html").read_text()
    for words in (
        "Is L2R better?",
        "not registered: no plan of the package",
        "2 whole seeds of 2 in the plan",
    ):
        assert words in page and words in (folder / "report.md").read_text()
    text = (folder / "report.md").read_text()
    by_seed = text.split("## Every seed: validation CE")[1]
    for result in StudyResults(folder).read():
        (row,) = (line for line in by_seed.splitlines() if line.startswith(f"| {result.arm} |"))
        assert (
            f"{result.trained['validation_ce']:.4f}"
            == row.strip("| ").split(" | ")[1 + result.seed]
        )
    (folder / "report.md").write_text("as it was committed")
    assert l2r("evidence", "small.yaml", "--judge-only").code == 0 and len(here) == 2
    assert (folder / "report.md").read_text() == "as it was committed"
    assert (tmp_path / "runs" / "evidence" / "small" / "report.md").read_text() == text
    assert l2r("evidence", "small.yaml").code == 0  # nothing is left to run
    assert (folder / "report.md").read_text() == text and len(here) == 2


def test_the_command_ends_as_its_processes_did(tmp_path, monkeypatch, l2r):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    monkeypatch.chdir(tmp_path)
    endings = {
        "stopped; the same command goes on from what was saved": ({1: 143}, signal.SIGTERM),
        "runs failed; the same command tries them again": ({1: 1, 2: 0}, None),
    }
    for words, (codes, number) in endings.items():
        ended = (codes, number)
        monkeypatch.setattr("l2r_lab.studies.plan_runs.run_processes", lambda *a, e=ended: e)
        done = l2r("evidence", "small.yaml")
        assert done.code == (143 if number else 1) and words in done.err and not done.out
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "run it without torchrun" in l2r("evidence", "small.yaml").refusal()
    monkeypatch.delenv("WORLD_SIZE")
    assert "unknown plan 'papr'" in l2r("evidence", "papr").refusal()


def test_processes_get_their_threads_and_hear_of_a_signal(tmp_path):
    """Two that wait for SIGTERM, which they pass on as their exit code."""
    code = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(3))\n"
        "name = os.environ['OMP_NUM_THREADS'] + '-' + str(os.getpid())\n"
        "(pathlib.Path(sys.argv[1]) / name).touch()\n"
        "time.sleep(60)\n"
    )

    def stop():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    helper = threading.Thread(target=stop)
    helper.start()
    codes, number = run_processes([sys.executable, "-c", code, str(tmp_path)], 2, 5)
    helper.join()
    assert (list(codes.values()), number) == ([3, 3], signal.SIGTERM)
    assert all(path.name.startswith("5-") for path in tmp_path.iterdir())


def test_results_of_another_recipe_are_refused(tmp_path):
    plan, places = registered(), StudyPlaces(tmp_path, tmp_path)
    (made, *_), cells = made_up(plan, 2, values()), plan.plan.cells(2)
    result = made.rounded()
    places.stored().append(result)
    assert results_of(plan, cells, places) == [result]
    with pytest.raises(
        ValueError, match=r"plan small says \(.+: its training.tokens is \d+, not 4096"
    ):
        results_of(registered(tokens=4096), registered(tokens=4096).plan.cells(2), places)


def test_a_recipe_that_seeds_share_is_parsed_once(tmp_path, monkeypatch):
    plan, places, parsed = registered(), StudyPlaces(tmp_path, tmp_path), []
    places.stored().append(*made_up(plan, 4, values()))
    parse = judging.parse_recipe
    monkeypatch.setattr(
        judging, "parse_recipe", lambda *a, **k: (parsed.append(a), parse(*a, **k))[1]
    )
    assert len(results_of(plan, plan.plan.cells(4), places)) == 8 and len(parsed) == 2


def test_verdicts_pair_the_seeds_that_both_arms_have():
    plan = registered()
    results = made_up(plan, 4, values(gap=-0.1))
    assert [j.verdict for j in judge_plan(plan.plan, results)] == ["better", "worse"]
    (first, _) = judge_plan(plan.plan, results[:-1])  # the last seed of l2r is missing
    assert first.seeds == 3 and first.difference.mean == pytest.approx(-0.1, abs=0.01)
    untrained = made_up(plan, 4, values(gap=-0.1, before=-0.1))
    assert [j.verdict for j in judge_plan(plan.plan, untrained)] == ["no verdict", "worse"]


def test_no_verdict_before_the_least_seeds():
    """What is clear with two seeds waits for the third where the plan asks for three."""
    results = made_up(registered(), 3, values(gap=-0.1))
    plan = registered(seeds={"least": 3, "most": 4})
    early = study_of(plan, [r for r in results if r.seed < 2])
    assert [j.verdict for j in early.judged] == ["no verdict"] * 2
    assert [j.needed for j in early.judged] == [None] * 2 and early.judged[0].p < plan.plan.alpha
    assert [j.verdict for j in judge_plan(plan.plan, results)] == ["better", "worse"]


def test_a_stopping_rule_without_a_primary_contrast_is_refused():
    secondary = [{**contrast, "primary": False} for contrast in SMALL["contrasts"]]
    with pytest.raises(ValueError, match="half_width: needs a primary contrast"):
        registered(half_width=0.01, contrasts=secondary)


@pytest.mark.parametrize("begun", [1, 4])
def test_hours_go_on_where_runs_were_begun_before(tmp_path, monkeypatch, begun):
    """A run that goes on has no time of its own: another one is timed, if one is missing."""
    plan, said = registered(), []
    places = StudyPlaces(tmp_path / "small", tmp_path / "runs" / "small")
    every = [result.rounded() for result in made_up(plan, 2, values())]
    untimed = {**every[0].facts, "seconds": None}
    every[:begun] = [dataclasses.replace(result, facts=untimed) for result in every[:begun]]

    def run(command, processes, threads):
        done = len(places.measured())
        limit = int(command[command.index("--cells-only") + 1])
        places.stored().append(*every[done : done + max(begun if not done else 0, limit)])
        return {1: 0}, None

    monkeypatch.setattr("l2r_lab.studies.plan_runs.run_processes", run)
    results = run_plan(plan, "small", places, Budget(2, hours=1, processes=1), said.append)
    assert len(results) == 4
    assert any("hours fit" in line for line in said) == (begun == 1)


def test_hours_give_whole_seeds_and_what_is_done_costs_nothing():
    plan = registered().plan
    results = made_up(registered(), 1, values(), seconds=900)  # both arms of the first seed
    assert [seeds_that_fit(plan, results, hours, 1, 4) for hours in (0, 0.5, 1, 9)] == [1, 2, 3, 4]
    assert seeds_that_fit(plan, results, 0.5, 2, 4) == 3
    half = made_up(registered(), 2, values(), seconds=900)[:3]  # of the second seed one arm
    assert [seeds_that_fit(plan, half, hours, 1, 4) for hours in (0, 0.25, 0.5, 0.75)] == [
        1,
        2,
        2,
        3,
    ]
    with pytest.raises(ValueError, match="hours need the time of a cell"):
        seeds_that_fit(plan, [], 1, 1, 4)
    on_gpu = [dataclasses.replace(r, facts={**r.facts, "gpus": ["other"]}) for r in results]
    with pytest.raises(ValueError, match="none was measured on this machine"):
        seeds_that_fit(plan, on_gpu, 1, 1, 4)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"seconds": 3600.0}, "4.0 hours of runs on a processor, torch 2.9."),
        ({"seconds": None}, "Run on a processor, torch 2.9."),
        ({"gpus": ["a card"] * 2}, "hours of runs on a card (a processor), torch 2.9."),
    ],
)
def test_the_report_names_what_ran_the_study(facts, words, tmp_path):
    plan, packages = registered(), {"torch": "2.9"}
    own = {"processor": "a processor", "gpus": [], "packages": packages, **facts}
    results = made_up(plan, 2, values())
    results = [dataclasses.replace(r, facts={**r.facts, **own}) for r in results]
    write_study(study_of(plan, results), tmp_path, tmp_path)
    assert words in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("mark", [{"digest": "older"}, {"commit": None}])
def test_results_from_before_the_plan_make_a_study_unregistered(mark):
    plan = registered()
    results = made_up(plan, 2, values())
    assert study_of(plan, results).state == "registered"
    late = dataclasses.replace(results[0], plan={**results[0].plan, **mark})
    state = study_of(plan, [late, *results[1:]]).state
    assert state.startswith("not registered: 1 of 4 results are older than the plan")


def test_a_plan_of_ones_own_that_was_edited_after_its_results_says_so():
    """Its commit is nobody's; the digest of its text is in every result."""
    plan = dataclasses.replace(registered(), commit=None, state="not registered: no git")
    results = made_up(plan, 2, values())
    assert study_of(plan, results).state == "not registered: no git"
    edited = dataclasses.replace(plan, digest="e")
    assert study_of(edited, results).state == (
        "not registered: no git; 4 of 4 results were made under another text of the plan"
    )


def test_the_page_shows_contrasts_effects_and_step_0(tmp_path):
    plan = registered(screens=SCREEN)

    def value(arm, seed, metric, trained):
        return values(gap=-0.1)(arm, seed, metric, trained) - 0.3 * (trained and "z=none" in arm)

    study = study_of(plan, made_up(plan, 3, value))
    page, text = write_study(study, tmp_path / "page", tmp_path / "text")
    assert page.stat().st_size > 1_000_000
    said = text.read_text()
    for words in ("Power, said before", "| z | none | -0.3", "better", "Precision reached"):
        assert words in said, words
    assert (
        "validation CE: is l2r smaller than linear?" in said
    )  # a contrast without a text of its own
    assert "| paper |" not in said  # no contrast has a place there
    shown = page.read_text()
    assert "gamma x z" in shown
    assert f"less that of {study.arms[0]}" in shown
    for once in (shown, said):  # over both tables, not under each
        assert once.count("paired by seed") == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_leaves_its_contrasts_without_a_verdict(tmp_path, bad):
    """A run whose loss is no number: the page says why, and judges the other metrics."""

    def value(arm, seed, metric, trained):
        spoiled = (arm, seed, metric, trained) == ("l2r", 1, "validation_ce", True)
        return bad if spoiled else values(gap=-0.1)(arm, seed, metric, trained)

    study = study_of(registered(), made_up(registered(), 4, value))
    loss, gain = study.judged
    assert (loss.verdict, loss.reason) == ("no verdict", "a value is not finite")
    assert gain.verdict != "no verdict" and gain.reason == ""
    _, text = write_study(study, tmp_path / "page", tmp_path / "text")
    said = text.read_text()
    assert "| a value is not finite |" in said and "there before training" not in said


@pytest.mark.parametrize("lacking", ["l2r", "narrow"])
def test_the_page_of_screens_draws_what_all_of_them_measured(tmp_path, lacking):
    """Either screen's results may be older than the flipped tokens."""
    screens = {
        **SCREEN,
        "narrow": {**SCREEN["l2r"], "changes": ["router.kind=l2r_sips", "router.rank=3"]},
    }
    plan = registered(screens=screens)
    results = [
        dataclasses.replace(
            r, trained={m: v for m, v in r.trained.items() if m != "flipped_tokens"}
        )
        if r.arm.startswith(f"{lacking} ")
        else r
        for r in made_up(plan, 3, values())
    ]
    study = study_of(plan, results)
    effects = effects_by_screen(study)
    drawn = {note.text for note in effect_plot(effects).layout.annotations}
    shared = ("validation CE", "routing gain", "load entropy")
    assert drawn == {f"{screen}: {metric}" for screen in screens for metric in shared}
    _, text = write_study(study, tmp_path / "page", tmp_path / "text")
    (other,) = screens.keys() - {lacking}
    assert {name: "flipped_tokens" in of for name, of in effects.items()} == {
        lacking: False,
        other: True,
    }
    assert text.read_text().count("| factor | level |") == 2


def test_losses_are_drawn_against_the_parameters_of_the_routers(tmp_path):
    """Arms that differ in rank alone are one line; without parameters there is no figure."""
    arms = {
        "linear": ["router.kind=linear"],
        **{f"rank {n}": ["router.kind=l2r_sips", f"router.rank={n}"] for n in (8, 2, 4)},
    }
    plan = registered(arms=arms, contrasts=[])
    losses = {"linear": 5.0, "rank 8": 5.1, "rank 2": 5.4, "rank 4": 5.2}
    sizes = {"linear": 256, "rank 8": 800, "rank 2": 200, "rank 4": 400}
    results = made_up(plan, 2, lambda arm, seed, metric, trained: losses[arm] + 0.1 * seed)
    assert size_plot(study_of(plan, results)) is None
    results = [
        dataclasses.replace(r, facts={**r.facts, "router_parameters": sizes[r.arm]})
        for r in results
    ]
    study = study_of(plan, results)
    figure = size_plot(study)
    drawn = {line.name: line for line in figure.data}
    assert list(drawn) == ["linear", "l2r_sips"]
    assert drawn["l2r_sips"].x == (200, 400, 800) and drawn["linear"].x == (256,)
    seeds = sorted({r.seed for r in results})
    middle = 0.1 * sum(seeds) / 2
    assert drawn["l2r_sips"].y == pytest.approx([5.4 + middle, 5.2 + middle, 5.1 + middle])
    assert drawn["l2r_sips"].error_y.array == pytest.approx([0.05 * (seeds[1] - seeds[0])] * 3)
    assert drawn["l2r_sips"].mode == "lines+markers+text" and drawn["linear"].mode == "markers+text"
    assert drawn["l2r_sips"].text == (" rank 2", " rank 4", " rank 8")
    assert figure.layout.xaxis.tickvals == (200, 256, 400, 800)
    _, text = write_study(study, tmp_path / "page", tmp_path / "text")
    assert "router parameters" in text.read_text()


@pytest.mark.parametrize(("count", "said"), [(10, False), (14, True)])
def test_the_curves_leave_no_arm_out_without_a_word(tmp_path, count, said):
    arms = {f"rank {n}": ["router.kind=l2r_sips", f"router.rank={n}"] for n in range(1, count + 1)}
    contrasts = [
        {"first": "rank 1", "second": arm, "metric": "train_ce", "better": "smaller"}
        for arm in list(arms)[1:]
    ]
    plan = registered(arms=arms, contrasts=contrasts)
    study = study_of(plan, made_up(plan, 3, values()))
    drawn = {curve.name for curve in curves_with_bands(study).data if curve.showlegend}
    assert said or drawn == set(arms)
    page, _ = write_study(study, tmp_path / "page", tmp_path / "text")
    assert (f"{len(drawn)} of {count} arms are drawn" in page.read_text()) is said


def test_the_page_of_a_study_without_results_says_so(tmp_path):
    _, text = write_study(study_of(registered(), []), tmp_path / "page", tmp_path / "text")
    assert "Fewer than registered" in text.read_text()


def test_results_that_lack_a_measure_do_not_count_for_it():
    """Those of a version before it, and images' top-1 in a study of language."""
    contrasts = [
        {"text": "a", "metric": m, "first": "l2r", "second": "linear", "better": "larger"}
        for m in ("logit_spread", "top1")
    ]
    plan = registered(contrasts=contrasts)
    older, *others = made_up(plan, 3, values())
    trained = {m: v for m, v in older.trained.items() if m != "logit_spread"}
    results = [dataclasses.replace(older, trained=trained), *others]
    judged = judge_plan(plan.plan, results)
    assert [j.seeds for j in judged] == [2, 0]
    assert [j.verdict for j in judged][1] == "no verdict"


def test_a_change_of_a_difference_is_taken_seed_by_seed():
    """Seed by seed the long runs' difference is 0.1 * seed above that of the short ones."""
    arms = {f"{router}-{n}": [f"router.kind={router}", f"training.tokens={n}"]
            for router in ("linear", "l2r_sips") for n in (2048, 4096)}  # fmt: skip
    since = {"first": "l2r_sips-4096", "second": "linear-4096", "metric": "validation_ce"}
    since["since"] = ["l2r_sips-2048", "linear-2048"]
    plan = registered(arms=arms, contrasts=[since], judge_secondary=False)

    def value(arm, seed, metric, trained):
        gap = 0.5 if arm.startswith("l2r") else 0.0
        grown = 0.1 * seed if arm == "l2r_sips-4096" else 0.0
        return 5 + seed + (gap + grown if trained else 0.0) - (arm.endswith("4096") and trained)

    results = made_up(plan, 3, value)
    (judged,) = judge_plan(plan.plan, results)
    assert judged.difference.mean == pytest.approx(0.1) and judged.sd == pytest.approx(0.1)
    assert judged.means == pytest.approx((-0.9, -1.0))
    assert (judged.seeds, judged.verdict, judged.needed) == (3, "interval", None)
    lacking = [r for r in results if (r.arm, r.seed) != ("linear-2048", 1)]
    assert judge_plan(plan.plan, lacking)[0].seeds == 2


def test_training_must_have_added_a_difference_of_losses_alone_where_the_plan_says_so():
    """The difference was there before training, in a loss and in flips."""
    pair = {"first": "l2r", "second": "linear", "better": "smaller"}
    contrasts = [{**pair, "metric": m} for m in ("validation_ce", "train_ce", "flipped_tokens")]
    found = {}
    for rule in ("all", "losses"):
        plan = registered(contrasts=contrasts, added_by_training=rule)
        results = made_up(plan, 4, values(gap=-0.1, before=-0.2))
        found[rule] = [(j.verdict, j.reason) for j in judge_plan(plan.plan, results)]
    there = ("no verdict", "there before training")
    assert found == {"all": [there] * 3, "losses": [there, there, ("better", "")]}
    assert registered().plan.added_by_training == "losses"  # of plans that do not say


def test_a_page_of_intervals_says_what_was_predicted_and_gives_secondary_contrasts_no_verdict(
    tmp_path,
):
    pair = {"first": "l2r", "second": "linear"}
    small, plain = {**pair, "metric": "bf16_kl"}, {**pair, "metric": "train_ce"}
    since = {**pair, "metric": "validation_ce", "since": ["linear", "l2r"]}
    primary = {**pair, "metric": "validation_ce", "primary": True}
    rules = {"judge_secondary": False, "added_by_training": "losses", "prediction": "L2R wins."}
    for first, verdict in (([primary], "(better)"), ([], "Intervals and no verdicts: 3 seeds.")):
        plan = registered(contrasts=[*first, small, plain, since], **rules)
        results = [
            dataclasses.replace(r, trained={**r.trained, "bf16_kl": 1e-6 * (2 + r.seed)})
            for r in made_up(plan, 3, values(gap=-0.1))
        ]
        study = study_of(plan, results)
        assert verdict in of_study(study).says
        _, text = write_study(study, tmp_path / "page", tmp_path / "text")
        said = text.read_text()
        _, _, secondary = said.partition("## Secondary contrasts\n\n")
        head, _, *rows = secondary.partition("\n\n")[0].splitlines()
        assert len(rows) == 3 and " verdict " not in head and " p " not in head
        assert "| +0.00e+00 [+0.00e+00, +0.00e+00] | l2r 3.00e-06 |" in rows[0]
        assert "is l2r - linear smaller than linear - l2r?" in rows[2]
        assert "Predicted, said before: L2R wins." in said and "by chance" not in said
        assert ("for the difference and of a loss for what training added" in said) is bool(first)


def test_a_measure_of_the_end_needs_none_of_step_0():
    contrast = {"first": "l2r", "second": "linear", "metric": "bf16_kl"}
    plan = registered(contrasts=[contrast])
    results = [
        dataclasses.replace(r, trained={"bf16_kl": 0.1 + r.seed + 0.01 * (r.arm == "l2r")})
        for r in made_up(plan, 3, values())
    ]
    (judged,) = judge_plan(plan.plan, results)
    assert judged.difference.mean == pytest.approx(0.01) and judged.verdict == "worse"


def test_a_seed_that_lacks_a_run_is_not_counted_as_one_of_the_plan(tmp_path):
    plan = registered()
    whole = made_up(plan, 2, values())
    for results, short in ((whole, False), (whole[:-1], True)):
        _, text = write_study(study_of(plan, results), tmp_path / "page", tmp_path / "text")
        assert ("Fewer than registered" in text.read_text()) is short


def test_a_plan_that_added_seeds_is_closed_as_it_is(tmp_path, monkeypatch, l2r):
    """Its page says so beside the plain paired t, and the command runs it no more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("l2r_lab.studies.plan_runs.run_processes", lambda *_: pytest.fail("it ran"))
    text = yaml.safe_dump({**SMALL, "seeds": {"least": 2, "most": 4}, "half_width": 1e-9})
    (tmp_path / "small.yaml").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    monkeypatch.setattr(registration, "CLOSED", {digest})
    monkeypatch.setattr(registration, "EARLIER", {digest})
    plan = read_plan("small.yaml")
    assert plan.closed and plan.plan.added_by_training == "all"
    StudyResults(tmp_path / "results" / "evidence" / "small").append(
        *(r.rounded() for r in made_up(plan, 3, values()))
    )
    assert "small is closed as it is" in l2r("evidence", "small.yaml").refusal()
    assert l2r("evidence", "small.yaml", "--judge-only").code == 0
    said = (tmp_path / "runs" / "evidence" / "small" / "report.md").read_text()
    assert " Closed: its number of seeds followed from the first" in said
    assert "| plain paired t |" in said and "stopping rule" not in said


def test_a_verdict_over_several_metrics_says_which_metric_was_decided():
    """Losses 1 lower and load entropies 1 lower: better in one metric, worse in the other."""
    pair = {"first": "l2r", "second": "linear", "primary": True}
    entropy = {**pair, "metric": "load_entropy", "better": "larger"}
    both = [{**pair, "metric": "validation_ce"}, entropy]
    margins = {"validation_ce": 0.02, "load_entropy": 0.02}
    for contrasts, words in (
        (both, "2 of 2 primary contrasts are decided: l2r is 0.999 nats below linear in "
               "validation CE (better); l2r is 0.999 below linear in load entropy (worse)."),
        (both[:1], "1 of 1 primary contrast is decided: l2r is 0.999 nats below linear in "
                   "validation CE (better)."),
    ):  # fmt: skip
        plan = registered(contrasts=contrasts, margins=margins)
        study = study_of(plan, made_up(plan, 4, values(gap=-1.0)))
        assert words in of_study(study).says


@pytest.mark.slow("whole trainings")
def test_images_are_measured_by_the_same_names(tmp_path):
    changes = ["training.epochs=null", "training.steps=2", "training.global_batch=16"]
    changes += ["training.micro_batch=16", "data.workers=0", "evaluation.max_batches=1"]
    vision = {"recipe": "demo-vision/linear", "changes": changes, "tokens": None, "sample": 32}
    plan = registered(**vision)
    places, cells = StudyPlaces(tmp_path / "results", tmp_path / "runs"), plan.plan.cells(1)[1:]
    assert run_share(plan, cells, places) == (0, None)
    (result,) = results_of(plan, cells, places)
    assert set(result.trained) == set(result.untrained) == {*MEASURES, "top1"}
    assert result.facts["units"] == 32 and 0 <= result.trained["top1"] <= 1
    # Routing before the first step is that of a model which no forward pass of training has
    # touched: such a pass moves the statistics of BatchNorm.
    task = build_task(cells[0].recipe, print)
    torch.manual_seed(cells[0].recipe.seed)
    fresh = measure._routing(task.build_model(), task, cells[0].recipe, 32)
    assert {name: result.untrained[name] for name in fresh} == pytest.approx(fresh, rel=1e-4)


def test_a_study_that_was_ended_says_why_and_runs_no_more(tmp_path, monkeypatch, l2r):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("l2r_lab.studies.plan_runs.run_processes", lambda *_: pytest.fail("it ran"))
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    plan = read_plan("small.yaml")
    folder = tmp_path / "results" / "evidence" / "small"
    for seeds in (1, 3):
        StudyResults(folder).path.unlink(missing_ok=True)
        StudyResults(folder).append(*(r.rounded() for r in made_up(plan, seeds, values())))
        (folder / "ended.txt").write_text("It could not\nanswer.\n")
        refusal = l2r("evidence", "small.yaml").refusal()
        assert "small was ended: It could not answer. --judge-only judges what there" in refusal
        assert l2r("evidence", "small.yaml", "--judge-only").code == 0
        text = (tmp_path / "runs" / "evidence" / "small" / "report.md").read_text()
        assert " Ended early." in text and "no verdicts yet" not in text
        without = "Ended after 1 seed of at least 2, without a verdict. It could not answer."
        assert (without in text) is (seeds == 1)


def test_results_that_are_not_there_are_not_judged(tmp_path, monkeypatch, l2r):
    monkeypatch.chdir(tmp_path)
    message = l2r("evidence", "decision", "--judge-only").refusal()
    assert "--judge-only needs results of decision" in message
    assert str(tmp_path / "results" / "evidence" / "decision") in message
    assert "unknown plan 'decison'" in l2r("evidence", "decison", "--judge-only").refusal()


@pytest.mark.slow("a Python of its own")
def test_results_that_are_not_there_are_named_before_torch_is_imported(tmp_path):
    """Outside of a clone the refusal took as long as torch and transformers take."""
    code = (
        "import sys; from l2r.cli import main\n"
        "try: main(['evidence', 'decision', '--judge-only'])\n"
        "except SystemExit as end: print(end.code, *({'torch', 'transformers'} & {*sys.modules}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["2"] and "--judge-only needs results" in ended.stderr
