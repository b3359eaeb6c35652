"""``l2r eval``: the paper's downstream tasks on a language model, accuracy on an image one."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from l2r.evaluation.paired import PairedDifference
    from l2r.evaluation.results import PaperRow
    from l2r.evaluation.scoring import TaskResult
    from l2r.report.tables import Table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "eval",
        epilog="Example: l2r eval runs/linear runs/l2r-sips --tasks paper --limit 100",
        help="Evaluate checkpoints on MMLU, BoolQ, HellaSwag, PIQA and SciQ and print the "
        "paper's full-results rows, with paired differences from the first (run again to go on "
        "after a kill), or an image classifier on its validation images.",
    )(evaluate)


def evaluate(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(help="Run folders, or Hugging Face folders of language or image models."),
    ],
    *,
    tasks: Annotated[
        str, typer.Option(help="paper, mmlu, or names: mmlu_stem,boolq,hellaswag,piqa,sciq.")
    ] = "paper",
    split: Annotated[
        str, typer.Option(help="val or test, for MMLU; others have one split.")
    ] = "val",
    limit: Annotated[int | None, typer.Option(help="First documents of each task.")] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="First scored answers of each task; the paper's numbers fit 1024."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Answers scored together.")] = 8,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of context; 2048 or the model's own if shorter.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results of one [the checkpoint folder].")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ... or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    data: Annotated[
        str | None,
        typer.Option(help="Images: digits, fashion-mnist or a folder [those of the run]."),
    ] = None,
    average: Annotated[
        bool, typer.Option("--average", help="Images: the moving average of the weights.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the row as JSON.")] = False,
) -> None:
    """Score every candidate answer and print accuracies in percent with standard errors."""
    from l2r.cli.console import print_table
    from l2r.cli.diagnose import names
    from l2r.evaluation.paired import paired_row
    from l2r.models import is_image_classifier

    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}")
    device = pick_device(device)
    if len(checkpoints) > 1 and out is not None:
        raise ValueError(f"out is for one checkpoint; got out={out} and {len(checkpoints)} of them")
    images = [checkpoint for checkpoint in checkpoints if is_image_classifier(checkpoint)]
    if images and len(checkpoints) > 1:
        raise ValueError(f"image classifiers are evaluated one at a time; got {images[0]} and more")
    if images:
        from l2r.cli.eval_images import evaluate_images

        evaluate_images(
            images[0],
            data=data,
            averaged=average,
            limit=limit,
            batch_size=batch_size,
            out=out or images[0],
            device=device,
            dtype=dtype,
            as_json=as_json,
        )
        return
    if split not in ("val", "test"):
        raise ValueError(f"split must be val or test; got {split!r}")
    settings = {
        "split": split,
        "limit": limit,
        "requests": requests,
        "max_length": max_length,
        "dtype": dtype,
    }
    results = {
        name: _evaluate(
            Path(checkpoint),
            out or Path(checkpoint),
            tasks=tasks,
            batch_size=batch_size,
            device=device,
            settings=settings,
        )
        for name, checkpoint in names([str(checkpoint) for checkpoint in checkpoints]).items()
    }
    first, *others = results
    pairs = {(name, first): paired_row(results[first], results[name]) for name in others}
    print_table(_results_table(results, pairs), as_json=as_json)


def _evaluate(
    checkpoint: Path, out: Path, *, settings: Any, **options: Any
) -> "dict[str, TaskResult]":
    """Results of one checkpoint by task, written to ``out``."""
    from l2r.data.atomic import write_json
    from l2r.evaluation.results import paper_row

    results = _run(checkpoint, out / "evaluation", settings=settings, **options)
    row = paper_row(results)
    write_json(
        out / "evaluation.json",
        {
            "checkpoint": checkpoint.resolve().name,
            "settings": settings,
            "tasks": {name: result.to_dict() for name, result in results.items()},
            "accuracy": row.accuracy,
            "standard_error": row.standard_error,
        },
    )
    for name, result in results.items():
        if result.truncated:
            typer.echo(f"{name}: {result.truncated} contexts cut to the model's length", err=True)
    typer.echo(f"wrote {out / 'evaluation.json'}", err=True)
    return results


def _run(
    checkpoint: Path, folder: Path, *, tasks: str, batch_size: int, device: str, settings: Any
) -> "dict[str, TaskResult]":
    import torch

    from l2r.evaluation.downstream import evaluate_tasks
    from l2r.evaluation.store import TaskStore
    from l2r.evaluation.tasks import select_tasks
    from l2r.models.loading import load_causal_lm
    from l2r.models.pretrained import checkpoint_folder

    select_tasks(tasks)  # a misspelt name should not cost loading a model
    model, tokenizer = load_causal_lm(checkpoint, dtype=getattr(torch, settings["dtype"]))
    identity = {**settings, "weights": _fingerprint(checkpoint_folder(checkpoint))}
    options = {k: v for k, v in settings.items() if k != "dtype"}
    with _progress_bar() as bar:
        shown: dict[str, Any] = {}

        def update(task: str, done: int, total: int) -> None:
            if task not in shown:
                shown[task] = bar.add_task(task, total=total)
            bar.update(shown[task], completed=done)

        return evaluate_tasks(
            model.to(device),
            tokenizer,
            tasks,
            batch_size=batch_size,
            store=TaskStore(folder, identity),
            on_progress=update,
            **options,
        )


def pick_device(name: str) -> str:
    """``auto`` is a GPU where there is one."""
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


_DTYPES = ("float32", "bfloat16", "float16")


def _progress_bar() -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def _fingerprint(folder: Path) -> str:
    """Changes when the checkpoint's files are written again; reads no weights."""
    weights = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin")]
    files = sorted([*weights, folder / "config.json"])
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _results_table(
    results: "dict[str, dict[str, TaskResult]]",
    pairs: "dict[tuple[str, str], dict[str, PairedDifference]]",
) -> "Table":
    """The paper's row of every checkpoint, then every difference with its interval."""
    from l2r.evaluation.results import COLUMNS, paper_row
    from l2r.report.tables import Table

    rows: list[tuple[str | float | None, ...]] = []
    for name, tasks in results.items():
        row: PaperRow = paper_row(tasks)
        rows.append((name, *(row.accuracy[column] for column in COLUMNS)))
        rows.append(("standard error", *(row.standard_error[column] for column in COLUMNS)))
    for (name, first), pair in pairs.items():
        for label, field in (
            (f"{name} - {first}", "difference"),
            ("95% from", "low"),
            ("95% to", "high"),
        ):
            rows.append(
                (label, *(100 * getattr(pair[c], field) if c in pair else None for c in COLUMNS))
            )
    caption = "MMLU is the mean of its four groups, Overall the mean of all eight tasks."
    if pairs:
        caption += " Differences are over the same documents, by pairs."
    return Table("Downstream accuracy (%)", ("Model", *COLUMNS), tuple(rows), caption, digits=1)
