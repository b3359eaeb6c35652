"""Which version of the corpus a recipe means: today's, or that of an older run or plan."""

from typing import get_args

import pytest
import yaml

from l2r.text.held_out import NEWEST
from l2r.text.rows import balanced_rows, even_rows
from l2r_lab.studies.registration import parse_plan, plan_names
from l2r_lab.training.language import LanguageTask
from l2r_lab.training.recipes.load import dump_recipe, load_recipe, parse_recipe
from l2r_lab.training.recipes.schema import CorpusVersion, LanguageRecipe, TextSection
from tests.l2r_lab.studies.studies import SMALL


def test_recipes_mean_the_newest():
    assert TextSection().corpus_version == NEWEST == max(get_args(CorpusVersion))
    assert load_recipe("demo/linear").data.corpus_version == NEWEST


@pytest.mark.parametrize(("tokens", "version"), [([], 1), (["a"], NEWEST)])
def test_a_run_written_before_there_were_versions_is_of_the_first(tokens, version):
    values = load_recipe("demo/linear").model_dump(mode="json")
    del values["data"]["corpus_version"]
    values["data"] |= {"tokens": tokens, "validation_tokens": tokens}
    recipe = parse_recipe(values, source="run")
    assert recipe.data.corpus_version == version
    again = parse_recipe(yaml.safe_load(dump_recipe(recipe)), source="run")
    assert again == recipe


def test_a_version_that_is_not_read_or_does_not_exist_is_refused():
    tokens = ["data.tokens=[a]", "data.validation_tokens=[b]"]
    with pytest.raises(ValueError, match="corpus_version is"):
        load_recipe("demo/linear", [*tokens, "data.corpus_version=1"])
    with pytest.raises(ValueError, match=r"data.corpus_version: .* 1 or 2"):
        load_recipe("demo/linear", ["data.corpus_version=3"])


def on_text(plan):
    recipes = (cell.recipe for cell in plan.cells(1))
    return [recipe.data for recipe in recipes if isinstance(recipe, LanguageRecipe)]


@pytest.mark.parametrize("name", plan_names())
def test_registered_plans_are_of_the_first_version_unless_they_name_another(name):
    plan = parse_plan(name)
    assert {data.corpus_version for data in on_text(plan)} <= {plan.corpus_version}
    later = (
        "anchor-lr-1024",
        "experts-1024",
        "experts-256",
        "flips",
        "flips-decision",
        "flips-screen",
        "needed-rank",
        "parts-256",
        "rank-8-of-256",
        "rivals-256",
        "ranked-1024",
        "ranked-64",
        "rivals-1024",
        "rivals-64",
        "tokens-256",
        "tokens-256-constant",
        "transfer",
        "why-256",
    )  # registered when there was a second
    assert plan.corpus_version == (2 if name in later else 1)


def test_a_plan_may_name_another_version_and_one_arm_its_own(tmp_path):
    arms = {"linear": [], "l2r": ["router.kind=l2r_sips", "data.corpus_version=1"]}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**SMALL, "arms": arms, "corpus_version": 2}, sort_keys=False))
    versions = [data.corpus_version for data in on_text(parse_plan(str(path)))]
    assert versions == [2, 1]


@pytest.mark.parametrize(("version", "choose"), [(1, even_rows), (2, balanced_rows)])
def test_validation_rows_are_chosen_by_the_version_too(tiny_changes, version, choose):
    changes = [*tiny_changes, f"data.corpus_version={version}"]
    task = LanguageTask(load_recipe("demo/linear", changes), lambda line: None)
    assert task.choose_rows is choose
