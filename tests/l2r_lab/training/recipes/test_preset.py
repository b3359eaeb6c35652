"""``router.preset=evidence``: options from the model's sizes, and no z-loss with them."""

import pytest
import yaml

from l2r import L2RConfig
from l2r_lab.training.recipes.load import dump_recipe, load_recipe

TUNED = L2RConfig.for_experts(num_experts=16, hidden_size=128, top_k=4)


@pytest.mark.parametrize("name", ["demo/linear", "demo/l2r-sips", "demo/xmoe"])
def test_the_preset_replaces_the_router_and_switches_the_z_loss_off(name):
    recipe = load_recipe(name, ["router.preset=evidence"])
    assert recipe.router == TUNED and recipe.losses.z == 0
    assert recipe == load_recipe("demo/l2r-sips-tuned")
    written = yaml.safe_load(dump_recipe(recipe))["router"]
    assert written == TUNED.to_dict()


def test_it_follows_the_sizes_of_the_model_wherever_they_stand():
    changes = ["router.preset=evidence", "model.num_experts=256"]
    for order in (changes, changes[::-1]):
        router = load_recipe("demo/linear", order).router
        assert (router.rank, router.heads) == (8, 1)
    assert load_recipe("fine-grained/l2r-sips").router == router


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_given_beside_it_holds(order):
    changes = ["router.preset=evidence", "losses.z=0.001", "router.rank=4", "router.kind=l2r_sips"]
    recipe = load_recipe("demo/l2r-dot", changes[::order])
    assert recipe.losses.z == 0.001
    assert recipe.router == L2RConfig(gamma=4.0, rank=4, heads=4, normalize_weights=True)


def test_a_file_may_give_both_and_another_router_over_it_drops_the_preset(tmp_path):
    base, above = tmp_path / "base.yaml", tmp_path / "above.yaml"
    base.write_text("base: demo/linear\nrouter: {preset: evidence, rank: 4}\nlosses: {z: 0.01}\n")
    recipe = load_recipe(str(base))
    assert (recipe.router.rank, recipe.router.heads, recipe.losses.z) == (4, 4, 0.01)
    above.write_text(f"base: {base}\nrouter: {{kind: xmoe}}\n")
    router = load_recipe(str(above)).router
    assert (router.kind, router.rank, router.normalize_weights) == ("xmoe", 4, False)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "demo/linear",
            ["router.preset=best"],
            "router: preset must be evidence; got preset='best'",
        ),
        (
            "demo/linear",
            ["router={preset: evidence, kind: xmoe}"],
            "router: preset evidence is of l2r_sips; got kind='xmoe'",
        ),
        (
            "demo/linear",
            ["router={preset: evidence, rnk: 2}"],
            "no option 'rnk' .did you mean 'rank'",
        ),
        ("demo-vision/linear", ["router.preset=evidence"], "router: preset is for language"),
        (
            "demo/linear",
            ["router.preset=evidence", "model.num_experts=0"],
            "model.num_experts: Input should be greater than 0",
        ),
    ],
)
def test_what_does_not_fit_it_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(name, changes)


def test_the_whole_recipe_says_what_the_preset_set_beside_the_router(l2r):
    line = "router.preset sets losses.z to 0, unless losses.z is given with it\n"
    shown = l2r("train", "demo/linear", "router.preset=evidence", "--show")
    assert shown.err == line and yaml.safe_load(shown.out)["losses"]["z"] == 0
    assert l2r("train", "demo/l2r-sips-tuned", "--show").err == line
    assert l2r("train", "demo/linear", "--show").err == ""
