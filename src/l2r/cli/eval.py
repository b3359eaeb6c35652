"""``l2r eval``: the paper's downstream tasks on a language model, accuracy on an image one."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from l2r.cli.options import AsJson, BatchSize, Device, TrustRemoteCode

# What the checkpoints of one kind can do nothing with.
_LANGUAGE_ONLY = ("tasks", "split", "requests", "length")
_IMAGES_ONLY = ("data", "average")


def eval(
    context: typer.Context,
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
    limit: Annotated[
        int | None, typer.Option(help="First documents of each task, or images.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="First scored answers of each task; the paper's numbers fit 1024."),
    ] = None,
    batch_size: BatchSize = 8,
    length: Annotated[
        int | None, typer.Option(help="Tokens of context; 2048 or the model's own if shorter.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results of one (default: the checkpoint folder)."),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    data: Annotated[
        str | None,
        typer.Option(help="Images: digits, fashion-mnist or a folder (default: those of the run)."),
    ] = None,
    average: Annotated[
        bool, typer.Option("--average", help="Images: the moving average of the weights.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate checkpoints on MMLU, BoolQ, HellaSwag, PIQA and SciQ and print the paper's
    full-results rows, with paired differences from the first (run again to resume after a kill), or
    an image classifier on its validation images.

    Accuracies are in percent, with standard errors; evaluation.json has them too.

    Example: l2r eval runs/linear runs/l2r-sips --tasks paper --limit 100
    """
    from l2r.checkpoints import is_image_classifier
    from l2r.cli.diagnose import names
    from l2r.evaluation.checkpoint import DTYPES, TaskSettings

    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if len(checkpoints) > 1 and out is not None:
        raise ValueError(f"out is for one checkpoint; got out={out} and {len(checkpoints)} of them")
    images = [checkpoint for checkpoint in checkpoints if is_image_classifier(checkpoint)]
    if images and len(checkpoints) > 1:
        raise ValueError(f"image classifiers are evaluated one at a time; got {images[0]} and more")
    common: Any = {"batch_size": batch_size, "device": device}
    common["trust_remote_code"] = trust_remote_code
    if images:
        _refuse(context, _LANGUAGE_ONLY, f"a language model; {images[0]} classifies images")
        common |= {"limit": limit, "dtype": dtype, "data": data, "averaged": average}
        _images(images[0], out or images[0], common, as_json=as_json)
        return
    _refuse(context, _IMAGES_ONLY, f"an image classifier; {checkpoints[0]} is none")
    common |= {"tasks": tasks, "settings": TaskSettings(split, limit, requests, length, dtype)}
    folders = {name: Path(path) for name, path in names([str(c) for c in checkpoints]).items()}
    _language(folders, out, common, as_json=as_json)


def _refuse(context: typer.Context, options: tuple[str, ...], kind: str) -> None:
    for name in options:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise ValueError(f"--{name} is for {kind}")


def _language(
    checkpoints: dict[str, Path], out: Path | None, options: Any, *, as_json: bool
) -> None:
    from l2r.cli.console import print_table, progress_bars
    from l2r.evaluation.checkpoint import RESULT, evaluate_language
    from l2r.evaluation.paired import paired_row
    from l2r.evaluation.results import COLUMNS, paper_row
    from l2r.report.paper_tables import downstream_table

    results = {}
    for name, checkpoint in checkpoints.items():
        folder = out or checkpoint
        with progress_bars() as bars:
            results[name] = evaluate_language(checkpoint, folder, on_progress=bars, **options)
        for task, result in results[name].items():
            if result.truncated:
                cut = f"{result.truncated} contexts cut to the model's length"
                typer.echo(f"{task}: {cut}", err=True)
        typer.echo(f"wrote {folder / RESULT}", err=True)
    first, *others = results
    rows = {name: paper_row(tasks) for name, tasks in results.items()}
    table = downstream_table(
        COLUMNS,
        {name: (row.accuracy, row.standard_error) for name, row in rows.items()},
        {f"{name} - {first}": paired_row(results[first], results[name]) for name in others},
    )
    print_table(table, as_json=as_json)


def _images(checkpoint: Path, out: Path, options: Any, *, as_json: bool) -> None:
    from l2r.cli.console import print_table, progress_bars
    from l2r.evaluation.checkpoint import RESULT, evaluate_images
    from l2r.report.paper_tables import images_table

    with progress_bars() as bars:
        record = evaluate_images(checkpoint, out, on_progress=partial(bars, "images"), **options)
    for name in record["skipped"]:
        typer.echo(f"skipped unreadable image {name}", err=True)
    print_table(images_table(record), as_json=as_json)
    typer.echo(f"wrote {out / RESULT}", err=True)
