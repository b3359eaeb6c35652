"""``l2r eval``: the paper's downstream tasks on a language model, accuracy on an image one."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from l2r.cli.experiment import say
from l2r.cli.options import (
    AsJson,
    BatchSize,
    Checkpoints,
    Device,
    DeviceMap,
    Dtype,
    Revision,
    Text,
    TrustRemoteCode,
    at_least,
    check_one_source,
    data_option,
    images_or_paths,
    out_option,
    read_text,
    refuse_options,
)
from l2r.cli.output import echo
from l2r.errors import InputError

# What the checkpoints of one kind, or text, can do nothing with.
_LANGUAGE_ONLY = ("tasks", "split", "requests", "length", "text", "stride")
_IMAGES_ONLY = ("average",)
_TASKS_ONLY = ("tasks", "split", "requests")
_TEXT_ONLY = ("stride",)


def eval(
    context: typer.Context,
    checkpoints: Checkpoints,
    *,
    text: Text = None,
    data: Annotated[
        list[str] | None,
        data_option(
            "text, *.txt, *.jsonl, *.parquet, repeated for more; of images digits, fashion-mnist "
            "or a folder (default: the run's own)",
            images_or_paths,
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="paper, mmlu, or names: mmlu_stem,boolq,hellaswag,piqa,sciq.")
    ] = "paper",
    split: Annotated[
        str, typer.Option(help="val or test, for MMLU; others have one split.")
    ] = "val",
    limit: Annotated[
        int | None,
        typer.Option(
            help="First documents of each task or text file, or images.", callback=at_least(1)
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="First scored answers of each task; the paper's numbers fit 1024."),
    ] = None,
    batch_size: BatchSize = 8,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens per row: 2048, or the model's own context if shorter."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Text: tokens from window to window (half of --length).")
    ] = None,
    out: Annotated[
        Path | None,
        out_option(
            "a folder for the results of one checkpoint (default: the checkpoint's own; "
            "evaluation/NAME for a hub id)"
        ),
    ] = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    average: Annotated[
        bool, typer.Option("--average", help="Images: the moving average of the weights.")
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate checkpoints on MMLU, BoolQ, HellaSwag, PIQA and SciQ, on text, or on images.

    Prints the paper's full-results rows, with paired differences from the first (run again to
    resume after a kill), or an image classifier's accuracy on its validation images. Accuracies
    are in percent, with 95% intervals; evaluation.json has them too. With --data or --text: nats
    per token, perplexity and bits per byte on text of your own, by file and in all, with paired
    differences from the first.

    Example: l2r eval runs/linear runs/l2r-sips --tasks paper --limit 100
    """
    from l2r.cli.diagnose import names
    from l2r.hf.checkpoints import (
        Placement,
        averaged_folder,
        check_reads,
        check_reads_text,
        is_image_classifier,
        local_checkpoint,
    )
    from l2r.runs.atomic import check_place
    from l2r.training.evaluation import TaskSettings, TextSettings, select_tasks

    placement = Placement(dtype, device, device_map, say)
    if len(checkpoints) > 1 and out is not None:
        raise InputError(f"out is for one checkpoint; got out={out} and {len(checkpoints)} of them")
    check_one_source(text, data)
    for path in checkpoints if data else ():
        if Path(path).is_file():
            raise InputError(f"every file needs its own --data; got {path} as a checkpoint")
    named = names(checkpoints)
    folders = {
        name: local_checkpoint(checkpoint, revision=revision, code=trust_remote_code)
        for name, checkpoint in named.items()
    }
    # Next to the weights, but not in the cache of hub ids.
    outs = {
        name: out or (folder if Path(named[name]).exists() else Path("evaluation") / name)
        for name, folder in folders.items()
    }
    for place in outs.values():
        check_place(place)
    images = [name for name, folder in folders.items() if is_image_classifier(folder)]
    if images and len(checkpoints) > 1:
        raise InputError(f"image classifiers are evaluated one at a time; got {images[0]} and more")
    common: Any = {"batch_size": batch_size, "placement": placement}
    common["trust_remote_code"] = trust_remote_code
    if images:
        refuse_options(context, _LANGUAGE_ONLY, f"a language model; {images[0]} classifies images")
        if len(data or ()) > 1:
            raise InputError(f"data must be one folder of images; got {', '.join(data or ())}")
        source = data[0] if data else None
        check_reads(folders[images[0]], source)
        opened = averaged_folder(folders[images[0]]) if average else folders[images[0]]
        common |= {"limit": limit, "data": source, "averaged": average}
        from l2r.cost.planning import Reads, announce

        some = [Reads(limit, None, batch_size)] if limit else []
        announce([(opened, some)], placement, say, trust_remote_code=trust_remote_code)
        _images(folders[images[0]], outs[images[0]], common, as_json=as_json)
        return
    refuse_options(context, _IMAGES_ONLY, f"an image classifier; {checkpoints[0]} is none")
    for folder in folders.values():
        check_reads_text(folder)
    if text is not None or data:
        refuse_options(context, _TASKS_ONLY, "tasks; leave it out with --data and --text")
        for path in data or ():
            if not Path(path).expanduser().exists():
                raise InputError(f"data must be text for a language model; got {path}")
        own = None if text is None else read_text(text)
        settings = TextSettings(length, stride, limit, dtype)
        from l2r.cli.eval_on_text import evaluate_on_text

        paths = [Path(path) for path in data or ()]
        evaluate_on_text(folders, outs, paths, own, settings, common, as_json=as_json)
        return
    refuse_options(context, _TEXT_ONLY, "text; give --data or --text too")
    select_tasks(tasks)
    common |= {"tasks": tasks, "settings": TaskSettings(split, limit, requests, length, dtype)}
    _language(folders, outs, common, as_json=as_json)


def _language(
    checkpoints: dict[str, Path], outs: dict[str, Path], options: Any, *, as_json: bool
) -> None:
    from l2r.cli.console import print_table, progress_bars
    from l2r.cost.planning import announce, reads_of_inputs
    from l2r.report.paper_tables import downstream_table
    from l2r.training.evaluation import (
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
    print_table(table, as_json=as_json)


def _images(checkpoint: Path, out: Path, options: Any, *, as_json: bool) -> None:
    from l2r.cli.console import print_table, progress_bars
    from l2r.report.paper_tables import images_table
    from l2r.training.evaluation import EVALUATION_FILE, evaluate_images

    with progress_bars() as bars:
        record = evaluate_images(checkpoint, out, on_progress=partial(bars, "images"), **options)
    for name in record["skipped"]:
        echo(f"skipped unreadable image {name}", err=True)
    print_table(images_table(record), as_json=as_json)
    echo(f"wrote {out / EVALUATION_FILE}", err=True)
