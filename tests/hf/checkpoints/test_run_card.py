"""The card of a run: every number is one of its files', and what is not there is not told."""

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from l2r.files.diagnosis import read_diagnosis
from l2r.files.final_losses import final_losses
from l2r.files.folder import RunFolder
from l2r.hf.checkpoints import load_causal_lm, run_card
from l2r.hf.checkpoints.run_card import run_of_checkpoint, run_sections, update_card
from l2r.hf.models.card import CARD, is_untouched
from l2r_lab.studies.measure import diagnose_run
from l2r_lab.training.loop import train
from l2r_lab.training.recipes.load import load_recipe

pytestmark = pytest.mark.usefixtures("coarse")


@pytest.fixture(scope="module")
def recipe(tiny_changes):
    return load_recipe("demo/l2r-sips", [*tiny_changes, "training.ema_decay=0.5"])


@pytest.fixture
def run(recipe, tmp_path):
    train(recipe, tmp_path / "run", show_progress=False)
    return RunFolder(tmp_path / "run")


def card(folder) -> ModelCard:
    text = (folder / CARD).read_text()
    assert is_untouched(text)
    return ModelCard(text)


def titles(text):
    return re.findall(r"^## (.+)", text, re.M)


def rows(text):
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.M))


def test_a_finished_run_tells_its_recipe_its_data_and_its_losses(run):
    text = card(run.model).text
    assert titles(text) == ["Router of layers 0, 1", "How to load it", "Training", "Limits"]
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    told, written = yaml.safe_load(block), run.read_recipe()
    # The folder of the text is this machine's.
    assert written["data"]["corpus"].endswith("/" + told["data"]["corpus"])
    assert written | {"data": None} == told | {"data": None}
    assert str(run.path.parent) not in text
    facts = run.read_json(run.environment)
    found = rows(text)
    assert found["data: train_tokens"] == f"{facts['data']['train_tokens']:,}"
    assert found["steps"] == "6" and found["tokens seen"] == f"{6 * 8 * 32:,}"
    losses = final_losses(run)
    assert found["validation ce"] == f"{losses['validation_ce']:.4g}"
    assert "How the weights were made is not recorded here" not in text


def test_averaged_weights_have_their_own_numbers(run):
    text = card(run.averaged_model).text
    last = run.read_metrics("validation")[-1]
    assert rows(text)["validation ce/mean"] == f"{last['ema/ce/mean']:.4g}"
    assert "moving average" in text and "train ce" not in text


def test_a_diagnosis_and_an_evaluation_enter_the_card(run, recipe, l2r, tmp_path):
    diagnose_run(run, recipe)
    found = rows(card(run.model).text)
    mean = read_diagnosis(run.path).mean()
    assert found["stability"] == f"{mean['stability']:.4g}"
    assert found["load entropy"] == f"{mean['entropy']:.4g}"
    result = {
        "settings": {"split": "val", "limit": None},
        "accuracy": {"PIQA": 51.25, "SciQ": 0.0, "Overall": None},
        "interval": {"PIQA": [45.34, 57.12], "SciQ": [0.0, 27.75], "Overall": None},
    }
    run.evaluation.write_text(json.dumps(result))
    update_card(run_of_checkpoint(run.path), load_causal_lm(run.path)[0])
    told = card(run.model).text
    assert titles(told)[2:] == ["Training", "Routing", "Evaluation", "Limits"]
    found = rows(told)
    assert found["PIQA"] == "51.2 (45.3 to 57.1)" and found["SciQ"] == "0.0 (0.0 to 27.8)"
    assert "Overall" not in found

    assert l2r("export", run.model, "--out", tmp_path / "alone").code == 0
    alone = card(tmp_path / "alone")
    assert alone.data.library_name == "transformers" and titles(alone.text) == titles(told)
    assert "trust_remote_code=True" in alone.text


def test_a_measurement_leaves_an_edited_card_and_makes_no_new_one(run, recipe):
    (run.model / CARD).write_text("# Mine\n")
    (run.averaged_model / CARD).unlink()
    diagnose_run(run, recipe)
    assert (run.model / CARD).read_text() == "# Mine\n"
    update_card(run, load_causal_lm(run.path)[0], averaged=True)
    assert not (run.averaged_model / CARD).exists()


def test_a_run_with_a_recipe_alone_tells_that_alone(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "data:\n  tokens: [/disk/mine/tokens, ~/other, near/by]\n"
    )
    (text,) = run_sections(run_of_checkpoint(tmp_path))
    assert yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.S)[0]) == {
        "data": {"tokens": ["tokens", "other", "near/by"]}
    }
    assert "|" not in text and "Losses" not in text


def test_images_are_told_as_shares(tmp_path):
    (tmp_path / "recipe.yaml").write_text("task: vision\n")
    record = {"averaged": True, "top1": 0.75, "top5": 1.0, "ce": 0.5, "images": 1200}
    (tmp_path / "evaluation.json").write_text(json.dumps(record))
    assert len(run_sections(run_of_checkpoint(tmp_path))) == 1
    _, text = run_sections(run_of_checkpoint(tmp_path), averaged=True)
    found = rows(text)
    assert found["top-1"] == "0.75" and found["images"] == "1,200"


def test_a_folder_outside_a_run_has_nothing_to_tell(tmp_path):
    assert run_of_checkpoint(tmp_path) is None and run_sections(None) == ()


def test_accuracy_names_the_images_that_it_is_of(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    record = {"top1": 0.5, "top5": 0.9, "ce": 1.0, "images": 10, "averaged": False}
    for more, words in (
        ({}, "of the run's validation images, by"),
        ({"data": "/home/me/other"}, "of the images of other, by"),
        ({"limit": 10}, "of the run's validation images, the first 10 at most, by"),
    ):
        run.write_json(run.evaluation, record | more)
        assert words in run_card._evaluation(run, averaged=False)
