"""``l2r diagnose``: what the routers of one checkpoint or several do."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.options import AsJson, BatchSize, Device


def diagnose(
    checkpoints: Annotated[
        list[str], typer.Argument(help="Hugging Face folders or run folders, compared in order.")
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Text file, folder of *.txt, or token files (default: the embedded corpus); for "
            "image classifiers digits, fashion-mnist or a folder (default: the run's own images)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and the numbers.")] = Path(
        "diagnosis"
    ),
    instances: Annotated[int, typer.Option(help="Rows of text over all domains, or images.")] = 64,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 256,
    batch_size: BatchSize = 8,
    sample: Annotated[int, typer.Option(help="Tokens kept for noise and figures.")] = 2048,
    certify: Annotated[
        int, typer.Option(help="Of these, tokens that get a certified radius; 0 for none.")
    ] = 128,
    gain: Annotated[
        int, typer.Option(help="Rows whose loss is taken with other experts too; 0 for none.")
    ] = 16,
    over_time: Annotated[
        bool,
        typer.Option(
            help="How far earlier checkpoints choose as the last: of one run, or those given."
        ),
    ] = False,
    sigma: Annotated[float, typer.Option(help="Noise on router inputs.")] = 0.02,
    threshold: Annotated[float, typer.Option(help="Margins below it are low.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of the sample and the noise.")] = 0,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Margins, robustness, certified radii, geometry and usage of any MoE checkpoint.

    Runs every checkpoint on the same data, saves its diagnosis, prints tables, writes the page.

    Example: l2r diagnose runs/demo/linear runs/demo/l2r_sips --out diagnosis
    """
    import torch

    from l2r.checkpoints.inputs import open_subject
    from l2r.cli.console import print_table, progress_bars
    from l2r.cli.over_time import of_list, training_checkpoints, within_run
    from l2r.diagnostics.choices import ChoiceLog
    from l2r.diagnostics.collect import collect
    from l2r.diagnostics.diagnose import Settings
    from l2r.diagnostics.diagnose import diagnose as measure
    from l2r.diagnostics.routing_gain import batch_loss, routing_gain, spread
    from l2r.report.diagnosis import checkpoint_tables, full_table, write_diagnosis

    for option, value in (("instances", instances), ("length", length), ("batch-size", batch_size)):
        if value < 1:
            raise ValueError(f"{option} must be >= 1; got {value}")
    if gain < 0:
        raise ValueError(f"gain must be >= 0 rows; got {gain}")
    earlier = training_checkpoints(checkpoints) if over_time else []
    settings = Settings(sigma=sigma, seed=seed, certify=certify)
    views = {}
    for name, checkpoint in names(checkpoints).items():
        subject = open_subject(
            checkpoint,
            data,
            instances=instances,
            length=length,
            report=lambda line: typer.echo(line, err=True),
        )
        log, batches = ChoiceLog(), partial(subject.batches, batch_size, torch.device(device))
        with progress_bars() as bars:
            steps = -(-subject.items // batch_size)
            records = collect(
                subject.model.to(torch.device(device)),
                batches(),
                domains=subject.domains,
                threshold=threshold,
                sample=sample,
                seed=seed,
                run=subject.run,
                log=log,
                report=partial(bars, f"{name}: data", total=steps),
            )
            choices = log.choices()
            few = spread(batches(), subject.items, gain, batch_size) if gain else []
            diagnosis = measure(
                records,
                domains=subject.domains,
                settings=settings,
                choices=choices,
                gain=routing_gain(subject.model, few, batch_loss) if few else None,
                report=partial(bars, f"{name}: layers", total=len(records)),
            )
        if subject.images is not None:
            from l2r.diagnostics.patches import validation_patches
            from l2r.report.patches import write_patch_page

            routing = validation_patches(subject.model, subject.images, count=12)
            page = write_patch_page(out / name, routing, type(subject.model).__name__)
            typer.echo(f"patches: {page}", err=as_json)
        if earlier:
            with progress_bars() as bars:
                done = partial(bars, f"{name}: checkpoints", total=len(earlier))
                found = within_run(earlier, subject, batches, choices, done)
            diagnosis.info["over_time"] = found
        diagnosis.info["checkpoint"] = checkpoint
        diagnosis.save(out / name)
        views[name] = diagnosis
    if over_time and not earlier:
        diagnosis.info["over_time"] = of_list(views)
        diagnosis.save(out / name)
    if as_json:
        print_table(full_table(views), as_json=True)
    else:
        for table in checkpoint_tables(views):
            print_table(table)
    page = write_diagnosis(views, out / "index.html")
    typer.echo(f"page: {page}", err=as_json)


def names(checkpoints: list[str]) -> dict[str, str]:
    """A name for every checkpoint: its last folder, or more of the path where that repeats."""
    paths = [Path(checkpoint).resolve() for checkpoint in checkpoints]
    if len(set(paths)) != len(paths):
        raise ValueError(f"checkpoints must differ; got {', '.join(checkpoints)}")
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        short = ["-".join(path.parts[-depth:]).replace("/", "") for path in paths]
        if len(set(short)) == len(short):
            return dict(zip(short, checkpoints, strict=True))
    raise ValueError(f"checkpoints must differ; got {', '.join(checkpoints)}")
