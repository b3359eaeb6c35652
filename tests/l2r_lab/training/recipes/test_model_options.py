"""From a recipe to the configuration of its model: every field arrives, parsed once."""

import pytest

from l2r import L2RConfig
from l2r.hf.models import L2rOlmoeConfig, L2rViTConfig
from l2r_lab.training.recipes.load import load_recipe

# What the task adds or uses itself: a folder to start from, and what tokens or images decide.
NOT_SIZES = {"init_from", "vocab_size", "rope_theta", "num_labels", "dense"}


@pytest.mark.parametrize(
    ("name", "config", "others", "changes"),
    [
        (
            "demo/l2r-sips",
            L2rOlmoeConfig,
            [500],
            ["model.initializer_range=0.01", "model.num_experts=7"],
        ),
        (
            "demo-vision/linear",
            L2rViTConfig,
            [],
            ["model.layer_norm_eps=0.5", "model.patch_size=4"],
        ),
    ],
)
def test_every_size_of_a_recipe_reaches_its_model(name, config, others, changes):
    recipe = load_recipe(name, changes)
    model = config(**recipe.model_options(*others))
    for field, value in recipe.model.model_dump(exclude=NOT_SIZES, exclude_none=True).items():
        assert getattr(model, field) == value, field
    assert model.router == recipe.router.to_dict()


def test_a_language_model_gets_its_vocabulary_positions_and_rotation():
    recipe = load_recipe("demo/linear", ["model.rope_theta=500.0", "data.sequence_length=64"])
    model = L2rOlmoeConfig(**recipe.model_options(321))
    assert (model.vocab_size, model.max_position_embeddings) == (321, 64)
    assert model.rope_parameters["rope_theta"] == 500.0
    recipe = load_recipe("demo/linear", ["model.vocab_size=1000"])
    assert recipe.model_options(321)["vocab_size"] == 1000


@pytest.mark.parametrize("name", ["demo/l2r-sips", "demo-vision/l2r-sips"])
def test_the_router_section_is_an_object_that_is_parsed_once(name):
    recipe = load_recipe(name)
    assert isinstance(recipe.router, L2RConfig)
    assert recipe.model_copy(update={"seed": 3}).router is recipe.router
    assert recipe.model_validate(recipe.model_dump()).router == recipe.router


@pytest.mark.parametrize(
    ("name", "config"), [("demo/xmoe", L2rOlmoeConfig), ("vit-s/xmoe", L2rViTConfig)]
)
def test_a_model_takes_the_object_and_writes_it_as_a_dictionary(name, config, tmp_path):
    router = load_recipe(name).router
    model = config(router=router)
    assert model.router == config(router=router.to_dict()).router == router.to_dict()
    model.save_pretrained(tmp_path)
    assert config.from_pretrained(tmp_path).router == router.to_dict()
