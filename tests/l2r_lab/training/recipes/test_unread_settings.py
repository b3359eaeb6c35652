"""A recipe's setting that nothing reads is refused, by the rule that the routers have."""

import pytest
import yaml

from l2r_lab.training.recipes.load import dump_recipe, load_recipe, recipe_names
from l2r_lab.training.recipes.schema import LanguageRecipe, RecipeSection
from l2r_lab.training.recipes.vision_schema import VisionRecipe

TOKENS = ["data.tokens=[a]", "data.validation_tokens=[b]"]


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        ("demo/linear", [*TOKENS, "data.corpus=text"], r"corpus is read only with tokens=\[\]"),
        (
            "demo/linear",
            [*TOKENS, "data.vocab_size=512"],
            "vocab_size=512 with tokens=.'a'.; leave",
        ),
        ("demo/linear", [*TOKENS, "data.characters_per_domain=20000"], "characters_per_domain is"),
        (
            "demo/linear",
            ["data.tokenizer=t.json"],
            r"tokenizer is read only with tokens other than",
        ),
        (
            "demo/linear",
            ["evaluation.task_limit=5"],
            r"task_limit is .* tasks other than \[\]; got",
        ),
        ("demo/linear", ["losses.margin_gap=0.2"], "margin_gap is read only with margin other"),
        ("demo-vision/linear", ["evaluation.task_limit=5"], "task_limit is read only with tasks"),
        ("demo/linear", ["optimizer.warmup=0", "optimizer.warmup_start=0.5"], "warmup_start is"),
        ("demo/linear", ["optimizer.weight_decay=0", "optimizer.decay_norms=false"], "decay_norms"),
        ("demo/linear", ["model.init_from=x", "model.initializer_range=0.5"], "initializer_range"),
        (
            "demo-vision/linear",
            ["data.augmentation.magnitude=3"],
            "only with randaugment other than",
        ),
        ("demo-vision/linear", ["model.moe_layers=[]"], "at least one block, or be null"),
        ("demo/linear", ["model.hidden_size=12"], r"must be even; got 12 / 4 = 3"),
        ("demo/linear", ["optimizer.betas=[0.9,1.0]"], "less than 1"),
        ("demo/linear", [f"seed={2**63}"], "less than 9223372036854775808"),
        ("demo/linear", ["data=5"], "data: .*dictionary"),
        ("demo-vision/linear", ["data=digits"], "data: .*dictionary"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(recipe, changes, message):
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe, changes)
    with pytest.raises(ValueError, match=message):
        load_recipe(recipe, changes[::-1])


def test_a_file_is_held_to_it_as_the_command_line_is(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: demo/linear\nevaluation: {task_limit: 5}\n")
    with pytest.raises(ValueError, match=rf"recipe {path}: task_limit is read only with tasks"):
        load_recipe(str(path))
    assert load_recipe(str(path), ["evaluation.tasks=[mmlu]"]).evaluation.task_limit == 5


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("small/gpu-linear", ["data.tokens=[]", "data.validation_tokens=[]"]),  # a tokenizer below
        ("vit-s/linear", ["optimizer.warmup=0"]),  # a warmup_start below
    ],
)
def test_what_a_base_says_of_more_than_its_recipe_reads_is_left_alone(recipe, changes):
    load_recipe(recipe, changes)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_written_out_in_full_loads(name, tmp_path):
    """Run folders hold every field, also what their base had and they do not read."""
    recipe = load_recipe(name, ["optimizer.warmup=0"])
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(str(path)) == recipe
    assert yaml.safe_load(path.read_text())["optimizer"]["warmup_start"] is not None


@pytest.mark.parametrize("recipe", [LanguageRecipe, VisionRecipe])
def test_the_conditions_name_fields_of_their_section(recipe):
    sections = [recipe]
    while sections:
        section = sections.pop()
        fields = section.model_fields
        for field, conditions in section.read_with.items():
            assert {field, *conditions} <= set(fields)
        kinds = [field.annotation for field in fields.values()]
        sections += [
            kind for kind in kinds if isinstance(kind, type) and issubclass(kind, RecipeSection)
        ]
