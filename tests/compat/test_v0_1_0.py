"""Runs and models that version 0.1.0 wrote still load, report and resume.

``v0_1_0`` holds a run of a one-layer model on the text of the fixture ``text_folder`` (its
checkpoint of step 4 of 6, its export, its diagnostics), a swapped stock OLMoE, and the logits that
0.1.0 gave for both.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import l2r
from tests.processes import command

OLD = Path(__file__).parent / "v0_1_0"


@pytest.mark.parametrize("name", ["run", "swapped"])
def test_models_of_0_1_0_give_the_same_logits(name: str) -> None:
    saved = load_file(OLD / "logits.safetensors")
    model = l2r.load_pretrained(OLD / name / "model" if name == "run" else OLD / name).eval()
    with torch.no_grad():
        logits = model(input_ids=saved["ids"]).logits
    # Sums of at most 300 products of numbers below 10, in fp32, in another order.
    torch.testing.assert_close(logits, saved[name], rtol=0, atol=300 * 10 * 2.0**-24)


@pytest.fixture
def old_run(tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(OLD / "run", tmp_path / "run")
    (tmp_path / "text").symlink_to(text_folder)  # the recipe names data by this relative path
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_a_run_of_0_1_0_is_reported(old_run: Path) -> None:
    printed = command(old_run.parent / "output", "report", "run").succeed()
    assert "0.306" in printed  # its mean margin, from its diagnostics


def test_an_unfinished_run_of_0_1_0_resumes(old_run: Path) -> None:
    from l2r.runs.folder import RunFolder

    shutil.rmtree(old_run / "model")
    before = RunFolder(old_run).read_metrics("train")
    # As if fields had been added since: the run's recipe lacks what today's writes out.
    text = (old_run / "recipe.yaml").read_text()
    (old_run.parent / "today.yaml").write_text(text)
    for line in ("  ema_decay: 0.0\n", "  tasks: []\n"):
        assert line in text
        text = text.replace(line, "")
    (old_run / "recipe.yaml").write_text(text)
    command(old_run.parent / "output", "train", "today.yaml", "--out", "run").succeed()
    after = RunFolder(old_run).read_metrics("train")
    assert [r["step"] for r in after] == [r["step"] for r in before]
    # Two steps from the same state: rounding, against 0.07 of progress between the two.
    for old, new in zip(before, after, strict=True):
        assert new["ce"] == pytest.approx(old["ce"], rel=1e-5)
    assert (old_run / "model" / "config.json").is_file()


def test_a_run_of_0_1_0_is_finished_for_recipes_that_mean_the_same(old_run: Path) -> None:
    from l2r.runs.folder import RunFolder
    from l2r.studies.run import is_finished
    from l2r.training.recipes.load import load_recipe

    path = old_run / "recipe.yaml"
    recipe, text = load_recipe(str(path)), path.read_text()
    # 1.0 is the default that the run has anyway
    for same in (text, text.replace("  heads: 4\n", "  heads: 4\n  beta: 1.0\n")):
        path.write_text(same)
        assert is_finished(RunFolder(old_run), recipe)
    for other in (text.replace("seed: 0", "seed: 1"), text.replace("heads: 4", "heads: 2")):
        path.write_text(other)
        assert not is_finished(RunFolder(old_run), recipe)


@pytest.mark.parametrize("change", [[], ["data.centre=0.5"]])
def test_a_vision_recipe_of_0_1_0_is_read(change: list[str], tmp_path: Path) -> None:
    from l2r.training.recipes.load import dump_recipe, load_recipe

    text = dump_recipe(load_recipe("demo-vision/linear", ["data.center=0.9"]))
    (tmp_path / "old.yaml").write_text(text.replace("center:", "centre:"))
    recipe = load_recipe(str(tmp_path / "old.yaml"), change)
    assert recipe.data.center == (0.5 if change else 0.9)
    assert "centre" not in dump_recipe(recipe)
