"""A run folder is resumed for recipes that mean the same, however they were written down."""

import pytest
import yaml

from l2r.runs.atomic import write_text
from l2r.runs.folder import RunFolder
from l2r.training.claim import has_recipe
from l2r.training.recipes.load import dump_recipe, load_recipe


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def wrote(run, recipe, change=lambda values: None):
    values = yaml.safe_load(dump_recipe(recipe))
    change(values)
    write_text(run.recipe, yaml.safe_dump(values))


def test_a_field_that_did_not_exist_when_the_run_began_has_its_default(run):
    recipe = load_recipe("demo/l2r-sips")

    def older(values):
        del values["training"]["ema_decay"], values["evaluation"]["tasks"]
        del values["router"]["beta"], values["router"]["anchor_init"]

    wrote(run, recipe, older)
    assert has_recipe(run, recipe)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("router.beta=1.0", True),  # its default, of the run too
        ("training.logger=none", True),
        ("router.heads=2", False),
        ("seed=1", False),
    ],
)
def test_only_what_training_depends_on_makes_another_run(run, change, same):
    wrote(run, load_recipe("demo/l2r-sips"))
    assert has_recipe(run, load_recipe("demo/l2r-sips", [change])) is same
