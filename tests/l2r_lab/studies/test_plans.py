"""Plans: what is refused before anything runs, what is registered, and what the package has."""

import dataclasses
import json
import subprocess
from collections import Counter

import numpy as np
import pytest
import yaml

import l2r
from l2r_lab.stats.effects import design
from l2r_lab.studies import registration
from l2r_lab.studies.earlier_plans import CLOSED, EARLIER
from l2r_lab.studies.judging import study_of
from l2r_lab.studies.registration import parse_plan, plan_names, read_plan
from l2r_lab.studies.study_plan import StudyPlan
from tests.l2r_lab.studies.studies import SMALL, made_up

ONE_FACTOR = {
    "factors": {"a": {"1": "", "2": "router.kind=xmoe"}},
    "cells": [["1"], ["2"]],
}


def written(tmp_path, values):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.mark.parametrize("name", plan_names())
def test_every_plan_of_the_package_has_recipes_that_load_and_cells_of_their_own(name):
    plan = parse_plan(name)
    cells = plan.cells(plan.seeds.most)
    assert len({cell.name for cell in cells}) == len(cells)
    meanings = {str(c.recipe.model_dump()) for c in cells}
    assert len(meanings) == len(cells)
    for cell in cells:
        own = [c for c in plan.all_arms()[cell.arm] if c.startswith("training.tokens=")]
        tokens = int(own[0].partition("=")[2]) if own else plan.tokens
        assert cell.recipe.training.tokens == tokens and cell.recipe.evaluation.every == 0


def test_the_papers_plan_has_its_claims_with_the_sizes_of_their_figures():
    plan = parse_plan("paper")
    assert len(plan.contrasts) >= 19 and sum(c.primary for c in plan.contrasts) == 3
    arms = {c.arm: c.recipe.router for c in plan.cells(1)}
    for where, fixed, varied in (("Figure 5a", "heads", "rank"), ("Figure 5b", "rank", "heads")):
        (claim,) = (c for c in plan.contrasts if c.where == where)
        first, second = arms[claim.first], arms[claim.second]
        assert getattr(first, fixed) == getattr(second, fixed) == {"heads": 4, "rank": 2}[fixed]
        sizes = getattr(first, varied), getattr(second, varied)
        assert sizes == {"rank": (2, 32), "heads": (16, 1)}[varied]


def test_the_screen_tunes_nobody_less_and_tells_its_effects_apart():
    """No effect has a standard error above 1.2 deviations of a run: they hardly share columns."""
    screens = parse_plan("screen").screens
    assert {len(screen.cells) for screen in screens.values()} == {14}
    for screen in screens.values():
        _, columns = design(screen.factors_levels(), screen.interactions, screen.cells)
        matrix = np.hstack([columns, np.ones((len(columns), 1))])
        assert np.sqrt(np.diag(np.linalg.inv(matrix.T @ matrix))[:-1]).max() < 1.2
    published = ["1", "paper", "2", "16", "plain"]
    assert screens["l2r"].cells[0] == published
    plan = parse_plan("screen")
    recipe = next(c.recipe for c in plan.cells(1) if c.arm.startswith("l2r gamma=1,z=paper,rank=2"))
    assert recipe.losses.z == 0.001 and recipe.losses.z_variant == "paper"
    assert recipe.router.gamma == 1 and recipe.router.heads == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sedes": {"least": 2}}, r"unknown field sedes \(did you mean 'seeds'\?\)"),
        ({"seeds": {"leest": 2}}, r"unknown field seeds.leest \(did you mean 'least'\?\)"),
        ({"seeds": {"least": 1}}, "seeds.least: Input should be greater than or equal to 2"),
        ({"seeds": {"least": 4, "most": 3}}, "least must be <= most; got 4 and 3"),
        ({"arms": {}}, "give at least 1"),
        ({"arms": {"top k": [], "top-k": ["router.kind=xmoe"]}, "contrasts": []},
         "arms: 'top k' and 'top-k' have one folder name, 'top-k'; rename one"),
        ({"arms": {"linear": [], "l2r": [], "s a=1": []}, "screens": {"s": ONE_FACTOR}},
         "arms: 's a=1' and 's a=1' have one folder name, 's-a-1'; rename one"),
        ({"margins": {}}, "a primary contrast needs one of validation_ce"),
        ({"half_width": 0.01, "contrasts": []}, "half_width: needs a primary contrast"),
        ({"seeds": {"least": 2, "most": 4}, "half_width": 0.01},
         "the number of seeds must be fixed: .*; got least=2, most=4, half_width=0.01"),
        ({"seeds": {"least": 2, "most": 4}}, "must be fixed: .*; got least=2, most=4, half_width="),
        ({"half_width": 0.01}, "must be fixed: .*; got least=2, most=2, half_width=0.01"),
        ({"added_by_training": "all"}, "added_by_training must be losses; got all"),
        ({"alpha": 0.7}, "alpha: Input should be less than 0.5"),
        ({"contrasts": [{"first": "l2r", "second": "lnear", "metric": "balance"}]},
         r"unknown arm 'lnear' \(did you mean 'linear'\?\)"),
        ({"contrasts": [{"first": "l2r", "second": "linear", "metric": "routing_gian"}]},
         r"unknown metric 'routing_gian' \(did you mean 'routing_gain'\?\)"),
        ({"contrasts": [{"first": "l2r", "second": "linear", "metric": "balance", "wher": ""}]},
         r"unknown field contrasts.0.wher \(did you mean 'where'\?\)"),
    ],
)  # fmt: skip
def test_a_bad_plan_is_refused_in_one_line(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as error:
        read_plan(written(tmp_path, {**SMALL, **change}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([["1", "none"], ["2", "paper"], ["3", "none"]], "a level of gamma, z"),
        ([["1"]], "a level of gamma, z"),
        ([["1", "none"], ["1", "none"]], "cells must differ"),
        ([["1", "none"], ["2", "paper"]], "2 cells do not separate 2 effects"),
    ],
)
def test_a_screen_that_cannot_be_read_is_refused(tmp_path, cells, message):
    factors = {
        "gamma": {"1": "router.gamma=1.0", "2": "router.gamma=2.0"},
        "z": {"paper": "losses.z=0.001", "none": "losses.z=0"},
    }
    screens = {"l2r": {"changes": ["router.kind=l2r_sips"], "factors": factors, "cells": cells}}
    with pytest.raises(ValueError, match=message):
        read_plan(written(tmp_path, {**SMALL, "screens": screens}))


def test_a_wrong_setting_of_an_arm_is_refused_before_anything_runs(tmp_path):
    arms = {**SMALL["arms"], "l2r": ["router.kind=l2r_sips", "router.rnk=2"]}
    registered = read_plan(written(tmp_path, {**SMALL, "arms": arms}))
    with pytest.raises(ValueError, match="has no option 'rnk'"):
        registered.plan.cells(1)


def test_an_unknown_plan_is_named_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown plan 'papr' \(did you mean 'paper'\?\); known:"):
        read_plan("papr")


def test_git_is_asked_about_no_plan_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a program was started"))
    plan = read_plan(written(tmp_path, SMALL))
    assert plan.commit is None and len(plan.digest) == 16
    assert plan.state == (
        f"not registered: no plan of the package; the digest of its text is {plan.digest}"
    )


def test_git_is_not_asked_where_the_package_lies_in_anothers_repository(tmp_path, monkeypatch):
    """As a virtual environment inside a stranger's project does."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(registration, "_CHECKOUT", tmp_path / "lib")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a program was started"))
    assert read_plan("paper").state == f"registered in l2r-moe {l2r.__version__}"


def git(folder, *args):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(folder), *identity, *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The folder of plans, which is a whole checkout once it has a .git."""
    monkeypatch.setattr(registration, "_FOLDER", tmp_path)
    monkeypatch.setattr(registration, "_CHECKOUT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("answer", [None, 'echo "fatal: dubious ownership" >&2; exit 128'])
def test_where_git_gives_no_answer_no_plan_is_registered(checkout, monkeypatch, answer):
    """No such program, or one that refuses: whether the plan was changed cannot be known."""
    path = written(checkout, SMALL)
    git(checkout, "init", "-q")
    git(checkout, "add", "mine.yaml")
    git(checkout, "commit", "-qm", "plan")
    written(checkout, {**SMALL, "tokens": 4096})
    programs = checkout / "programs"
    programs.mkdir()
    if answer is not None:
        (programs / "git").write_text(f"#!/bin/sh\n{answer}\n")
        (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    plan = read_plan(path)
    assert plan.commit is None and plan.state == "not registered: git gave no answer"


def test_a_plan_that_git_ignores_is_not_registered(checkout):
    path = written(checkout, SMALL)
    git(checkout, "init", "-q")
    (checkout / ".gitignore").write_text("*.yaml\n")
    git(checkout, "add", ".gitignore")
    git(checkout, "commit", "-qm", "something else")
    plan = read_plan(path)
    assert plan.commit is None and plan.state == "not registered: no git commit has this text"


def test_a_plan_of_the_package_is_registered_once_git_has_it_as_it_stands(checkout):
    path = written(checkout, SMALL)
    assert read_plan(path).commit == f"l2r-moe {l2r.__version__}"  # as it was installed
    git(checkout, "init", "-q")
    assert read_plan(path).state == "not registered: no git commit has this text"
    git(checkout, "add", "mine.yaml")
    git(checkout, "commit", "-qm", "plan")
    plan, commit = read_plan(path), git(checkout, "rev-parse", "HEAD")
    assert plan.commit == commit and plan.state.startswith(f"registered in commit {commit} of ")
    (checkout / "other").write_text("")
    git(checkout, "add", "other")
    git(checkout, "commit", "-qm", "something else")
    assert read_plan(path) == plan
    for source, target in (("mine.yaml", "moved.yaml"), ("moved.yaml", "mine.yaml")):
        git(checkout, "mv", source, target)
        git(checkout, "commit", "-qm", "a move")
        assert read_plan(str(checkout / target)).commit == commit
    written(checkout, {**SMALL, "tokens": 4096})
    changed = read_plan(path)
    assert changed.commit is None and changed.digest != plan.digest
    last = git(checkout, "rev-parse", "HEAD")  # the move back
    assert changed.state.startswith(f"not registered: the text was changed after commit {last}")


def commit_all(folder, message):
    git(folder, "add", "--all")
    git(folder, "commit", "-qm", message)
    return git(folder, "rev-parse", "HEAD")


def edited(text):
    return text.replace("tokens: 2048", "tokens: 4096")


@pytest.mark.parametrize("kept", [False, True])  # a rename, or a copy beside the first
def test_a_plan_that_moves_and_changes_in_one_commit_is_not_of_the_commit_before(checkout, kept):
    path = checkout / "mine.yaml"
    written(checkout, SMALL)
    git(checkout, "init", "-q")
    first = commit_all(checkout, "plan")
    moved = checkout / "moved.yaml"
    moved.write_text(edited(path.read_text()))
    if not kept:
        path.unlink()
    assert read_plan(str(moved)).commit is None
    second = commit_all(checkout, "a move with an edit")
    plan = read_plan(str(moved))
    assert plan.plan.tokens == 4096 and plan.commit == second != first
    results = made_up(dataclasses.replace(plan, commit=first), 2, lambda *_: 5.0)
    state = study_of(plan, results).state
    assert state == (
        f"not registered: 4 of 4 results name a commit that does not hold the plan; the first that "
        f"does is {second}"
    )
    moved.rename(checkout / "again.yaml")  # the same text: its commit stays
    commit_all(checkout, "a move")
    (checkout / "far" / "away").mkdir(parents=True)
    (checkout / "again.yaml").rename(checkout / "far" / "away" / "mine.yaml")
    commit_all(checkout, "into another folder")
    path.write_bytes((checkout / "far" / "away" / "mine.yaml").read_bytes())
    assert read_plan(str(path)).commit == second


def test_results_that_name_a_lost_commit_are_counted(checkout):
    path = written(checkout, SMALL)
    git(checkout, "init", "-q", "-b", "main")
    first = commit_all(checkout, "plan")
    git(checkout, "checkout", "-q", "-b", "other")
    (checkout / "other").write_text("")
    lost = commit_all(checkout, "of a branch that was not merged")
    git(checkout, "checkout", "-q", "main")
    plan = read_plan(path)
    named = [first, lost, "0" * 40, first]
    results = [
        dataclasses.replace(result, plan={**result.plan, "commit": commit})
        for result, commit in zip(made_up(plan, 2, lambda *_: 5.0), named, strict=True)
    ]
    assert study_of(plan, results).state == (
        f"{plan.state}; 2 of 4 results name a commit that is not in this repository"
    )
    assert study_of(plan, made_up(plan, 2, lambda *_: 5.0)).state == plan.state


def test_a_clone_without_its_history_registers_nothing(checkout, tmp_path_factory, monkeypatch):
    written(checkout, SMALL)
    git(checkout, "init", "-q")
    commit_all(checkout, "plan")
    (checkout / "other").write_text("")
    commit_all(checkout, "something else")
    clone = tmp_path_factory.mktemp("clone")
    git(clone, "clone", "-q", "--depth", "1", f"file://{checkout}", ".")
    for name in ("_FOLDER", "_CHECKOUT"):
        monkeypatch.setattr(registration, name, clone)
    plan = read_plan(str(clone / "mine.yaml"))
    assert plan.commit is None and "the clone is shallow; git fetch --unshallow" in plan.state


@pytest.mark.slow("git looks through its history for every plan")
def test_the_results_of_the_package_that_name_a_doubtful_commit_are_these():
    """20 of a commit that a rebase took away, 8 of one that is older than the plan."""
    if not (registration._CHECKOUT / ".git").exists() or registration._is_shallow():
        pytest.skip("no history to ask")
    counts = Counter()
    for name in plan_names():
        plan = read_plan(name)
        path = registration._CHECKOUT / "results" / "evidence" / name / "results.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        commits = Counter(run["plan"]["commit"] for run in map(json.loads, lines) if "arm" in run)
        assert plan.commit and (not commits or None not in commits)
        for commit, reason in registration.doubtful_commits(plan, commits).items():
            counts[name, reason] += commits[commit]
    assert counts == {
        ("rank-8-of-256", registration.LOST): 20,
        ("experts-64-width-256", registration.WITHOUT_PLAN): 8,
    }


def test_the_source_of_a_result_is_the_tree_of_src(checkout):
    assert registration.source_tree() == {"tree": None, "changed": None}  # no checkout
    git(checkout, "init", "-q")
    (checkout / "src").mkdir()
    (checkout / "src" / "code.py").write_text("1")
    (checkout / "docs.md").write_text("1")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "code")
    tree = git(checkout, "rev-parse", "HEAD:src")
    (checkout / "docs.md").write_text("2")
    git(checkout, "commit", "-qam", "docs")  # another commit, the same source
    assert registration.source_tree() == {"tree": tree, "changed": False}
    (checkout / "src" / "code.py").write_text("2")
    assert registration.source_tree() == {"tree": tree, "changed": True}


def test_the_long_study_has_seeds_of_its_own_and_arms_that_were_tried():
    """Its arms are those of an earlier plan but for seeds and length; no text is read twice."""
    plans = {name: parse_plan(name) for name in plan_names()}
    seeds = {n: {c.recipe.seed for c in p.cells(p.seeds.most)} for n, p in plans.items()}
    study, constant = plans["tokens-256"], plans["tokens-256-constant"]
    sharing = {name for name in seeds if seeds[name] & seeds["tokens-256"]}
    assert sharing == {"tokens-256", "tokens-256-constant"}
    assert len(seeds["tokens-256"]) == study.seeds.least == study.seeds.most == 16
    assert seeds["tokens-256-constant"] == set(sorted(seeds["tokens-256"])[:8])
    tried = {c.arm: c.recipe for c in plans["rank-8-of-256"].cells(1)}
    arms = {c.arm: c.recipe for c in [*study.cells(1), *constant.cells(1)]}
    for arm, recipe in arms.items():
        before = tried[arm.partition("-")[0]]
        differing = {
            f"{section}.{field}"
            for section, values in recipe.model_dump().items()
            if isinstance(values, dict)
            for field, value in values.items()
            if value != before.model_dump()[section][field]
        }
        longer = set() if arm.endswith("1m") else {"training.tokens"}
        assert differing == longer | ({"optimizer.final"} if "constant" in arm else set())
        assert recipe.training.tokens <= 4_417_024  # of the corpus, version 2
    assert study.whole_seeds and constant.whole_seeds
    assert [c.metric for c in study.contrasts if c.primary] == ["validation_ce"]
    assert study.seeds_that_decide() is None and not study.judge_secondary


def test_seeds_follow_from_the_first_only_where_some_are_added():
    adding = {**SMALL, "seeds": {"least": 2, "most": 4}, "half_width": 0.01}
    assert StudyPlan.model_validate(SMALL).seeds_that_decide() is None
    assert StudyPlan.model_validate(adding).seeds_that_decide() == 2
    fixed = {**adding, "seeds": {"least": 3, "most": 3}}
    assert StudyPlan.model_validate(fixed).seeds_that_decide() is None


def test_earlier_plans_are_those_of_the_package_and_the_eight_that_added_seeds_are_closed(
    monkeypatch,
):
    monkeypatch.setattr(registration, "in_checkout", lambda: False)  # git need not look
    plans = {name: read_plan(name) for name in plan_names()}
    new = {name for name, plan in plans.items() if plan.digest not in EARLIER}
    assert new == {"tokens-256", "tokens-256-constant"} and len(plans) == len(EARLIER) + 2
    adding = {name for name, plan in plans.items() if plan.plan.seeds_that_decide() is not None}
    assert adding == {name for name, plan in plans.items() if plan.closed} and len(CLOSED) == 8
    for name, plan in plans.items():
        assert plan.plan.added_by_training == ("losses" if name in new else "all")
