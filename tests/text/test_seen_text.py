"""Text to measure a checkpoint on that it was not trained on."""

import dataclasses

import pytest

from l2r.files.atomic import write_text
from l2r.text.corpus import CorpusOptions, unseen_part
from l2r_lab.training.recipes.load import dump_recipe, load_recipe

CUT = ["data.characters_per_domain=50000"]


@pytest.fixture
def run(tmp_path):
    """``run(*changes)``: a folder with the recipe of a language run."""

    def write(*changes):
        recipe = load_recipe("demo/linear", changes or CUT)
        write_text(tmp_path / "run" / "recipe.yaml", dump_recipe(recipe))
        return tmp_path / "run"

    return write


def test_a_run_of_version_1_is_measured_on_what_its_own_cut_held_out(run):
    own = CorpusOptions(characters_per_domain=50_000, version=1)
    path = run(*CUT, "data.corpus_version=1")
    for checkpoint in (path, str(path), path / "model", path / "model-ema"):
        assert unseen_part(checkpoint) == own
    assert unseen_part(path.parent) == unseen_part(path / "other") == CorpusOptions()


def test_since_version_2_all_held_out_text_is_new_whatever_the_cut(run):
    assert unseen_part(run()) == unseen_part(None) == CorpusOptions()


def test_a_folder_that_a_run_was_trained_on_gives_what_the_run_held_out(run, tmp_path):
    text = tmp_path / "text"
    for version in (1, 2):
        path = run(*CUT, f"data.corpus={text}", f"data.corpus_version={version}")
        own = CorpusOptions(str(text), characters_per_domain=50_000, version=version)
        assert unseen_part(path, text) == own
        again = unseen_part(path, f"{text}/../text")
        assert again == dataclasses.replace(own, folder=f"{text}/../text")
        assert unseen_part(path, tmp_path / "other") is None
        assert unseen_part(path) == CorpusOptions()


def test_a_folder_is_known_again_from_another_place(run, tmp_path, monkeypatch):
    """The recipe has it as it was typed where the run began, in a folder above the run."""
    (tmp_path / "text").mkdir()
    path = run(*CUT, "data.corpus=text")
    own = CorpusOptions("../../text", characters_per_domain=50_000, version=2)
    (path / "model").mkdir()
    monkeypatch.chdir(path / "model")
    assert unseen_part("..", "../../text") == unseen_part(".", "../../text") == own
    assert unseen_part("..", ".") is None


def test_folders_are_whole_for_checkpoints_that_say_nothing(run, tmp_path):
    assert unseen_part(tmp_path, tmp_path / "text") is None
    tokens = run("data.tokens=[a]", "data.validation_tokens=[b]")
    assert unseen_part(tokens) == CorpusOptions() and unseen_part(tokens, tmp_path) is None
