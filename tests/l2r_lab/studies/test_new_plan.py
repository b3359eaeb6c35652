"""A new plan has the seeds that its margin needs, and reads back as it was asked for."""

import json
from pathlib import Path

import numpy as np
import pytest

from l2r_lab.files.study import CellResult, StudyResults
from l2r_lab.studies.new_plan import Question, seconds_per_run, write_plan
from l2r_lab.studies.registration import read_plan
from tests.l2r_lab.studies.studies import made_up

ARMS = {"r2": ["router.rank=2"], "r8": ["router.rank=8"]}
NEW = ("evidence", "new", "ranks.yaml", "--recipe", "demo/l2r-sips", "--tokens", 1024000)
ONE, OTHER = ("--arm", "r2:router.rank=2"), ("--arm", "r8:router.rank=8,losses.z=0")


def test_the_seeds_find_the_margin_in_eight_of_ten_simulated_studies():
    from scipy.stats import t

    question = Question("ranks", "demo/l2r-sips", ARMS, margin=0.02, sd=0.02)
    seeds = question.seeds_needed()
    cut = t.ppf(1 - 0.05 / 2, seeds - 1)
    drawn = np.random.default_rng(0).normal(0.02, 0.02, size=(20_000, seeds))
    ratio = drawn.mean(axis=1) / (drawn.std(axis=1, ddof=1) / np.sqrt(seeds))
    share = float((ratio > cut).mean())
    assert share > 0.8 - 4 * np.sqrt(0.8 * 0.2 / 20_000)  # four standard errors
    assert question.detectable(seeds - 1) > 0.02 >= question.detectable(seeds)


def test_more_arms_need_more_seeds():
    three = {**ARMS, "r32": ["router.rank=32"]}
    seeds = [Question("ranks", "demo/l2r-sips", arms).seeds_needed() for arms in (ARMS, three)]
    assert seeds[0] < seeds[1]


def test_the_command_writes_what_was_asked_for(tmp_path, monkeypatch, l2r):
    monkeypatch.chdir(tmp_path)
    done = l2r(*NEW, *ONE, *OTHER, "--margin", 0.05, "--first-seed", 7, "--json")
    assert done.code == 0, done
    plan = read_plan("ranks.yaml").plan
    assert plan.arms == {"r2": ["router.rank=2"], "r8": ["router.rank=8", "losses.z=0"]}
    assert [(c.first, c.second, c.metric, c.primary) for c in plan.contrasts] == [
        ("r8", "r2", "validation_ce", True)
    ]
    seeds = plan.seeds.least
    assert (plan.seeds.first, plan.seeds.most, plan.tokens) == (7, seeds, 1024000)
    rows = {row["seeds"]: row for row in json.loads(done.out)}
    assert rows[seeds]["difference found with power 0.8"] <= 0.05
    assert rows[seeds]["hours of one core"] is None  # nothing was timed here
    assert "exists" in l2r(*NEW, *ONE, *OTHER).refusal()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ONE, "--arm must be given at least twice"),
        ((*ONE, *ONE), "--arm must have different names"),
        ((*ONE, "--arm", "r8:router.rnk=8"), "did you mean 'rank'"),
        ((*ONE, *OTHER, "--metric", "loss"), "unknown metric 'loss'"),
        ((*ONE, *OTHER, "--margin", 0), "--margin must be > 0 and finite; got 0"),
        ((*ONE, *OTHER, "--margin", 0.0001), "--margin must be at least"),
        ((*ONE, *OTHER, "--sd", "nan"), "--sd must be > 0 and finite; got nan"),
    ],
    ids=["one arm", "a name twice", "a field", "a metric", "no margin", "small margin", "nan"],
)
def test_what_cannot_be_a_plan_is_refused_and_nothing_is_written(
    options, words, tmp_path, monkeypatch, l2r
):
    monkeypatch.chdir(tmp_path)
    assert words in l2r(*NEW, *options).refusal()
    assert not Path("ranks.yaml").exists()


def test_hours_follow_from_runs_of_the_same_model(tmp_path):
    question = Question("ranks", "demo/l2r-sips", ARMS, tokens=1024000)
    plan = write_plan(tmp_path / "ranks.yaml", question)
    registered = read_plan(str(tmp_path / "ranks.yaml"))
    results = made_up(registered, 2, lambda *_: 1.0, seconds=100.0)
    recipe = plan.cells(1)[0].recipe.model_dump(mode="json")
    assert seconds_per_run(plan, tmp_path / "none") is None
    for result in results:
        facts = {**result.facts, "units": 512000}
        stored = {**vars(result), "recipe": recipe, "facts": facts}
        StudyResults(tmp_path / "results" / "old").append(CellResult(**stored))
    assert seconds_per_run(plan, tmp_path / "results") == pytest.approx(200.0)
