"""The packaged recipes: headers that say what to run and to expect, and routers from one place."""

import re
from pathlib import Path

import pytest

from l2r import L2RConfig
from l2r.files.shared_settings import PAPER_ROUTERS
from l2r_lab.studies.registration import parse_plan
from l2r_lab.training.recipes.load import load_recipe, recipe_header, recipe_names, recipes_in

ROOT = Path(__file__).parents[4]
NOT_RUN = ("not yet run", "in the paper", "that of")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_opens_with_what_how_where_and_what_to_expect(name):
    lines = recipe_header(name).splitlines()
    words = [line.partition(":")[0] for line in lines]
    assert [w for w in words if w in ("Command", "Hardware", "Expected")] == [
        "Command",
        "Hardware",
        "Expected",
    ]
    assert f"l2r train {name}" in recipe_header(name) and "{" not in recipe_header(name)


@pytest.mark.parametrize("name", recipe_names())
def test_an_expected_number_was_seen_or_the_recipe_says_that_it_was_not_run(name):
    """A number that is not the paper's stands in the document that the header names."""
    expected = " ".join(recipe_header(name).rpartition("Expected: ")[2].split())
    seen = re.search(r"([\d.]+(?: ± [\d.]+)?) .*\(([\w/-]+\.md)", expected)
    if seen is None:
        assert any(words in expected for words in NOT_RUN)
    else:
        assert seen.group(1) in (ROOT / seen.group(2)).read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", ["demo", "demo-vision", "fashion-mnist"])
def test_a_folder_of_settings_has_the_papers_six_routers(folder):
    kinds = {load_recipe(name).router.kind for name in recipes_in(folder)}
    assert kinds == set(PAPER_ROUTERS)


def test_recipes_of_a_folder_differ_in_the_router_alone_and_tuned_ones_in_the_z_loss():
    for name in recipes_in("demo"):
        dump, plain = (load_recipe(n).model_dump(exclude={"router"}) for n in (name, "demo/linear"))
        if name.endswith("-tuned"):
            assert dump["losses"].pop("z") == 0 < plain["losses"].pop("z")
        assert dump == plain, name


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("olmoe-1b-7b/l2r-sips-heads-16", "olmoe-1b-7b/l2r-sips"),
        ("olmoe-1b-7b/l2r-sips-rank-2", "olmoe-1b-7b/l2r-sips-heads-4"),
        ("zoo/linear", "demo/linear"),
    ],
)
def test_a_second_name_of_a_run_says_so(name, same):
    assert load_recipe(name) == load_recipe(same)
    assert f"the same run as {same.removeprefix('olmoe-1b-7b/')}" in recipe_header(name)


def test_the_tuned_router_is_that_of_few_experts_and_the_arm_that_was_judged():
    recipe = load_recipe("demo/l2r-sips-tuned")
    assert recipe.router == L2RConfig.for_experts(num_experts=16, hidden_size=128, top_k=4)
    judged = {c.arm: c.recipe for c in parse_plan("decision").cells(1)}["l2r-best"]
    assert judged.router == recipe.router and judged.losses == recipe.losses


def test_settings_are_a_base_for_recipes_of_a_user(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: demo/_base\nrouter: {kind: xmoe, rank: 4}\n")
    assert load_recipe(str(path)).model == load_recipe("demo/linear").model
    path.write_text("base: demo/l2r-sips\nrouter: {heads: 4}\n")
    assert load_recipe(str(path)).router == L2RConfig(rank=2, heads=4)


def test_an_unknown_recipe_is_named_with_the_nearest():
    for read in (load_recipe, recipe_header):
        with pytest.raises(ValueError, match=r"unknown recipe 'demo/l2r-sip'.*demo/l2r-sips"):
            read("demo/l2r-sip")


@pytest.mark.parametrize(
    ("arm", "name"),
    [("linear", "linear"), ("low-rank", "low-rank"), ("xmoe", "xmoe"), ("l2r", "l2r-sips")],
)
def test_fine_grained_recipes_are_the_arms_of_the_registered_plan(arm, name):
    """All but when they validate, log and save."""
    plan = {cell.arm: cell.recipe for cell in parse_plan("rank-8-of-256").cells(1)}[arm]
    recipe = load_recipe(f"fine-grained/{name}")
    when = {"training": {"log_every"}, "evaluation": {"every"}, "checkpoint": {"every"}}
    assert recipe.model_dump(exclude=when) == plan.model_dump(exclude=when)
