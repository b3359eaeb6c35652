"""Downstream tasks asked during training: recorded, shown, without a trace in the weights."""

import pytest
import torch
from safetensors.torch import load_file

from l2r.files.folder import RunFolder
from l2r.hf.checkpoints import load_causal_lm
from l2r_lab.report.curves import LANGUAGE_PANELS, curves
from l2r_lab.training import loop
from l2r_lab.training.evaluation.downstream import evaluate_tasks
from l2r_lab.training.recipes.load import load_recipe

TASKS = ["evaluation.tasks=[mmlu,piqa]", "evaluation.task_limit=3", "training.steps=4"]


@pytest.mark.slow("trainings with every task")
def test_accuracies_are_recorded_and_leave_the_run_as_it_is(tiny_changes, tmp_path):
    for name, changes in (("with", TASKS), ("without", TASKS[2:])):
        recipe = load_recipe("demo/l2r-sips", [*tiny_changes, *changes])
        loop.train(recipe, tmp_path / name, show_progress=False)
    run = RunFolder(tmp_path / "with")
    records = run.read_metrics("tasks")
    assert [(r["step"], r["tokens"]) for r in records] == [(3, 768), (4, 1024)]
    model, tokenizer = load_causal_lm(tmp_path / "with")
    expected = evaluate_tasks(model, tokenizer, ["mmlu", "piqa"], limit=3)
    for task, result in expected.items():
        assert records[-1][task] == pytest.approx(result.accuracy)
    groups = [result.accuracy for task, result in expected.items() if task != "piqa"]
    assert records[-1]["mmlu"] == pytest.approx(sum(groups) / 4) and len(groups) == 4
    assert "overall" not in records[-1]
    one, two = (
        load_file(tmp_path / n / "model" / "model.safetensors") for n in ("with", "without")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)

    without = RunFolder(tmp_path / "without")
    titles = {
        name: [a.text for a in curves({name: [r]}, LANGUAGE_PANELS, "tokens").layout.annotations]
        for name, r in (("with", run), ("without", without))
    }
    assert "MMLU accuracy" in titles["with"] and "PIQA accuracy" in titles["with"]
    assert "HellaSwag accuracy" not in titles["with"]
    assert not any("accuracy" in title for title in titles["without"])


def test_unknown_tasks_are_refused_before_the_corpus_is_built(tiny_changes, tmp_path):
    recipe = load_recipe(
        "demo/l2r-sips", [*tiny_changes, "evaluation.tasks=[helaswag]", "data.corpus=/nonexistent"]
    )
    with pytest.raises(ValueError, match=r"'helaswag' \(did you mean 'hellaswag'\?\)"):
        loop.train(recipe, tmp_path / "run", show_progress=False)


def test_images_have_no_questions():
    with pytest.raises(ValueError, match=r"evaluation\.tasks are questions for language models"):
        load_recipe("demo-vision/linear", ["evaluation.tasks=[mmlu]"])
