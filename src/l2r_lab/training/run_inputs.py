"""A trained run with the validation data of its recipe, as a subject of a diagnosis."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l2r.analysis import DiagnosisSubject
from l2r.files.folder import RunFolder
from l2r.hf.checkpoints import load_causal_lm, load_image_classifier
from l2r.machine import pick_device
from l2r_lab.training.claim import check_text
from l2r_lab.training.recipes import AnyRecipe, VisionRecipe
from l2r_lab.training.run_corpus import preparation
from l2r_lab.training.task import Task, build_task


def open_run(folder: Path, recipe: AnyRecipe) -> DiagnosisSubject:
    """Return final model of a run, with the instances that its recipe validates on.

    Raises ValueError where the folder holds no model, or its text has changed since it began.
    """
    task = build_task(recipe, _silent)
    check_text(RunFolder(folder), task)
    model, tokenizer = load_final(folder, recipe)
    model = model.to(pick_device("auto"))
    rows = recipe.evaluation.max_batches * recipe.evaluation.batch_size
    return validation_subject(model, task, recipe, rows, tokenizer)


def load_final(folder: Path, recipe: AnyRecipe) -> tuple[nn.Module, Any]:
    """Return final model of a run, and the tokenizer of a language model."""
    if isinstance(recipe, VisionRecipe):
        return load_image_classifier(folder), None
    return load_causal_lm(folder)


def validation_subject(
    model: nn.Module, task: Task, recipe: AnyRecipe, rows: int, tokenizer: Any = None
) -> DiagnosisSubject:
    """Return a model with ``rows`` validation instances of a task, chosen as for validation.

    All of them where there are fewer. Text has the domains of its files, images their classes.
    """
    data: Any = task
    if isinstance(recipe, VisionRecipe):
        from l2r.images import ImageInput  # text needs no image package

        images = ImageInput(data.validation, preparation(data.recipe.data))
        count = min(rows, len(images.dataset))
        return DiagnosisSubject(
            model, partial(images.batches, count), count, images.domains, {}, images
        )
    dataset = data.validation
    chosen = data.choose_rows(dataset, rows)

    def text_batches(size: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
        for start in range(0, len(chosen), size):
            batch = dataset.rows(chosen[start : start + size])
            yield {name: value.to(device) for name, value in batch.items()}

    options = {"use_cache": False}
    return DiagnosisSubject(
        model, text_batches, len(chosen), dataset.domains, options, tokenizer=tokenizer
    )


def _silent(line: str) -> None:
    del line
