"""``l2r eval``: losses on text of one's own; with the laboratory, tasks and accuracy on images."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

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
from l2r.cli.output import echo, say
from l2r.errors import InputError
from l2r.laboratory import need_laboratory

# What the checkpoints of one kind, or text, can do nothing with.
_LANGUAGE_ONLY = ("tasks", "split", "requests", "length", "text", "stride")
_IMAGES_ONLY = ("average",)
_TASKS_ONLY = ("tasks", "split", "requests")
_TEXT_ONLY = ("stride",)
_FILES = 30  # more are not printed one by one


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
            "a folder for the results of one checkpoint (default: a run's own; evaluation/NAME "
            "for any other folder and for a hub id)"
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
    from l2r.files.atomic import check_place
    from l2r.hf.checkpoints import (
        Placement,
        averaged_folder,
        check_reads,
        check_reads_text,
        is_image_classifier,
        local_checkpoint,
    )
    from l2r.text import TextSettings

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
    # A run keeps its results; a folder of weights, the hub's cache too, stays as it is.
    outs = {
        name: out or (Path("evaluation") / name if (folder / "config.json").is_file() else folder)
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
        from l2r.analysis import Reads, announce

        some = [Reads(limit, None, batch_size)] if limit else []
        announce([(opened, some)], placement, say, trust_remote_code=trust_remote_code)
        evaluate = need_laboratory("cli.eval_tasks", "evaluate_on_images", "accuracy on images")
        evaluate(folders[images[0]], outs[images[0]], common, as_json=as_json)
        return
    refuse_options(context, _IMAGES_ONLY, f"an image classifier; {checkpoints[0]} is none")
    for folder in folders.values():
        check_reads_text(folder)
    if text is not None or data:
        refuse_options(context, _TASKS_ONLY, "tasks; leave it out with --data and --text")
        for path in data or ():
            if not Path(path).exists():
                raise InputError(f"data must be text for a language model; got {path}")
        own = None if text is None else read_text(text)
        settings = TextSettings(length, stride, limit, dtype)

        paths = [Path(path) for path in data or ()]
        evaluate_on_text(folders, outs, paths, own, settings, common, as_json=as_json)
        return
    refuse_options(context, _TEXT_ONLY, "text; give --data or --text too")
    evaluate = need_laboratory("cli.eval_tasks", "evaluate_on_tasks", "--tasks")
    common |= {"tasks": tasks, "settings": (split, limit, requests, length, dtype)}
    evaluate(folders, outs, common, as_json=as_json)


def evaluate_on_text(
    checkpoints: dict[str, Path],
    outs: dict[str, Path],
    paths: list[Path],
    own: str | None,
    settings: Any,
    options: Any,
    *,
    as_json: bool,
) -> None:
    """Score texts with every checkpoint; print their losses and the differences from the first.

    The texts are those of ``paths``, or ``own`` alone.
    """
    from l2r.analysis import announce, reads_of_text
    from l2r.cli.console import print_table, progress_bars
    from l2r.report.text_loss import text_table
    from l2r.text import ALL_FILES, Texts, evaluate_text, read_line, text_differences, text_losses

    texts, results, losses = Texts(paths, settings.limit, own=own), {}, {}
    code: Any = {"trust_remote_code": options["trust_remote_code"]}

    def expect(checkpoint: Path, share: float) -> None:
        size = options["batch_size"]
        reads, tokens = reads_of_text(checkpoint, texts, settings, size, share=share, **code)
        announce([(checkpoint, reads)], options["placement"], say, tokens=tokens, **code)

    for name, checkpoint in checkpoints.items():
        with progress_bars() as bars:
            scored, written = evaluate_text(
                checkpoint,
                outs[name],
                texts,
                settings=settings,
                on_progress=partial(bars, name),
                expect=partial(expect, checkpoint),
                **options,
            )
        results[name], losses[name] = scored, text_losses(scored)
        echo(f"wrote {written}", err=True)
    read = next(iter(losses.values()))[ALL_FILES].tokens
    count = len({document.file for document in next(iter(results.values()))})
    line = read_line(read, count, count) if own is None else f"read {read:,} tokens of the text"
    echo(line, err=True)
    first, *others = results
    pairs = {
        f"{name} - {first}": text_differences(results[first], results[name]) for name in others
    }
    files = [name for name in losses[first] if name != ALL_FILES]
    shown = {*files, ALL_FILES}
    if not as_json:
        shown = (
            {ALL_FILES}
            if len(files) > _FILES
            else {*files, *([ALL_FILES] if len(files) > 1 else [])}
        )
    if shown == {ALL_FILES}:
        echo(f"{len(files)} files, by file in what was written", err=True)

    def records(of: Any) -> Any:
        return {
            name: {text: numbers.to_dict() for text, numbers in by.items() if text in shown}
            for name, by in of.items()
        }

    print_table(text_table(records(losses), records(pairs)), as_json=as_json)
