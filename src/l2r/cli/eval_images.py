"""Accuracy of an image classifier, for ``l2r eval``."""

from pathlib import Path

import typer


def evaluate_images(
    checkpoint: Path,
    *,
    data: str | None,
    averaged: bool,
    limit: int | None,
    batch_size: int,
    out: Path,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Print top-1 and top-5 accuracy and write them to ``out``/evaluation.json.

    Raises ValueError without images, or when the images are of other classes.
    """
    import torch
    from rich.progress import Progress

    from l2r.checkpoints import load_image_classifier
    from l2r.checkpoints.image_input import open_image_input
    from l2r.cli.console import print_table
    from l2r.evaluation.accuracy import evaluate_accuracy
    from l2r.report.tables import Table
    from l2r.runs.atomic import write_json

    model = load_image_classifier(checkpoint, averaged=averaged, dtype=getattr(torch, dtype))
    model.to(device)
    images = open_image_input(checkpoint, model.config, data)
    with Progress(transient=True, disable=as_json) as progress:
        task = progress.add_task("images", total=None)
        found = evaluate_accuracy(
            model,
            images.dataset,
            mean=images.section.mean,
            deviation=images.section.deviation,
            batch_size=batch_size,
            max_images=limit,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    for name in found.skipped:
        typer.echo(f"skipped unreadable image {name}", err=True)
    # Standard error of a share of independent images.
    errors = [100 * (p * (1 - p) / found.images) ** 0.5 for p in (found.top1, found.top5)]
    record = {
        "checkpoint": checkpoint.resolve().name,
        "averaged": averaged,
        "top1": found.top1,
        "top5": found.top5,
        "ce": found.loss,
        "images": found.images,
        "skipped": list(found.skipped),
    }
    write_json(out / "evaluation.json", record)
    name = checkpoint.resolve().name + (" (average)" if averaged else "")
    table = Table(
        "Accuracy on images (%)",
        ("Model", "Top-1 (%)", "Top-5 (%)", "CE", "images", "skipped"),
        (
            (
                name,
                100 * found.top1,
                100 * found.top5,
                found.loss,
                found.images,
                len(found.skipped),
            ),
            ("standard error", *errors, None, None, None),
        ),
        digits=2,
    )
    print_table(table, as_json=as_json)
    typer.echo(f"wrote {out / 'evaluation.json'}", err=True)
