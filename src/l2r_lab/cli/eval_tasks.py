"""The paper's downstream tasks and accuracy on images, for ``l2r eval``."""

from functools import partial
from pathlib import Path
from typing import Any

from l2r.cli.output import echo, say


def evaluate_on_tasks(
    checkpoints: dict[str, Path], outs: dict[str, Path], options: Any, *, as_json: bool
) -> None:
    """Evaluate language models on the paper's tasks; print a row each, and paired differences."""
    from l2r_lab.training.evaluation import TaskSettings, select_tasks

    select_tasks(options["tasks"])  # before torch is imported
    options = {**options, "settings": TaskSettings(*options["settings"])}
    from l2r.analysis import announce, reads_of_inputs
    from l2r.cli.console import print_table, progress_bars
    from l2r_lab.report.paper_tables import downstream_table
    from l2r_lab.training.evaluation import (
        EVALUATION_FILE,
        TASK_COLUMNS,
        evaluate_language,
        paired_row,
        paper_row,
    )

    code: Any = {"trust_remote_code": options["trust_remote_code"]}

    def expect(checkpoint: Path, lengths: list[int]) -> None:
        work = [(checkpoint, reads_of_inputs(lengths, options["batch_size"]))]
        announce(work, options["placement"], say, tokens=sum(lengths), **code)

    results = {}
    for name, checkpoint in checkpoints.items():
        folder, expected = outs[name], partial(expect, checkpoint)
        with progress_bars() as bars:
            results[name] = evaluate_language(
                checkpoint, folder, on_progress=bars, expect=expected, **options
            )
        for task, result in results[name].items():
            if result.truncated:
                cut = f"{result.truncated} contexts cut to the model's length"
                echo(f"{task}: {cut}", err=True)
        echo(f"wrote {folder / EVALUATION_FILE}", err=True)
    first, *others = results
    rows = {name: paper_row(tasks) for name, tasks in results.items()}
    table = downstream_table(
        TASK_COLUMNS,
        {name: row.interval for name, row in rows.items()},
        {f"{name} - {first}": paired_row(results[first], results[name]) for name in others},
    )
    print_table(table, as_json=as_json, max_columns=len(table.columns))


def evaluate_on_images(checkpoint: Path, out: Path, options: Any, *, as_json: bool) -> None:
    """Evaluate an image classifier on its validation images; print its accuracy."""
    from l2r.cli.console import print_table, progress_bars
    from l2r_lab.report.paper_tables import images_table
    from l2r_lab.training.evaluation import EVALUATION_FILE, evaluate_images

    with progress_bars() as bars:
        record = evaluate_images(checkpoint, out, on_progress=partial(bars, "images"), **options)
    for name in record["skipped"]:
        echo(f"skipped unreadable image {name}", err=True)
    print_table(images_table(record), as_json=as_json)
    echo(f"wrote {out / EVALUATION_FILE}", err=True)
