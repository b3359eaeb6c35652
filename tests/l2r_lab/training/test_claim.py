"""A run folder is resumed for recipes that mean the same, however they were written down."""

import json
import os
import shutil

import pytest
import yaml

from l2r.files.atomic import write_text
from l2r.files.folder import RunFolder
from l2r_lab.training import loop
from l2r_lab.training.claim import has_recipe
from l2r_lab.training.recipes.load import dump_recipe, load_recipe


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


@pytest.fixture
def own(text_folder, tmp_path):
    """A copy of the text that a test may change."""
    return shutil.copytree(text_folder, tmp_path / "own")


def add_a_file(own):
    """Of the same words, so that the vocabulary keeps its size and the model its shapes."""
    path = own / "animals" / "more.txt"
    path.write_text("cat cat dog dog bird " * 100)
    return path


@pytest.fixture
def train(run, own, tiny_changes):
    """``train()`` begins the run on the copy, or resumes it; ``train(stop=N)`` dies at step N."""

    def train(stop=None):
        def dying(step):
            if step == stop:
                raise RuntimeError("the machine is gone")

        recipe = load_recipe("demo/linear", [*tiny_changes, f"data.corpus={own}"])
        return loop.train(recipe, run.path, show_progress=False, on_step=dying)

    with pytest.raises(RuntimeError, match="gone"):
        train(stop=3)
    return train


def test_a_run_does_not_resume_on_text_that_has_changed(train, run, own):
    begun = {path: path.read_bytes() for path in (run.environment, run.metrics)}
    added = add_a_file(own)
    with pytest.raises(ValueError, match="has changed since the run began") as error:
        train()
    assert "\n" not in str(error.value) and str(own) in str(error.value)
    assert str(run.path) in str(error.value)
    assert begun == {path: path.read_bytes() for path in begun}
    added.unlink()
    assert train().finished


def test_text_that_was_copied_is_the_same_text(train, own):
    """It is built again, for its times are others, to the same tokens."""
    for path in own.rglob("*.txt"):
        os.utime(path, ns=(0, 0))
    assert train().finished


def test_a_run_that_did_not_note_its_text_goes_on(train, run, own):
    facts = run.read_json(run.environment)
    del facts["data"]["text_sha256"]
    run.environment.write_text(json.dumps(facts))
    add_a_file(own)
    assert train().finished


def test_another_recipe_is_named_before_its_text(train, run, own, tiny_changes):
    add_a_file(own)
    with pytest.raises(ValueError, match=r"another recipe: its data\.corpus is .+, not "):
        loop.train(load_recipe("demo/linear", tiny_changes), run.path, show_progress=False)
