"""``l2r diagnose``: what the routers of one checkpoint or several do."""

from contextlib import nullcontext
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
    text: Annotated[
        int, typer.Option(help="Tokens shown as text with their experts; 0 for none.")
    ] = 1024,
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
    from l2r.diagnostics.collect import collect
    from l2r.diagnostics.diagnose import Settings
    from l2r.diagnostics.diagnose import diagnose as measure
    from l2r.diagnostics.text_routing import TextTrace
    from l2r.report.diagnosis import checkpoint_tables, full_table, write_diagnosis
    from l2r.report.text_view import text_sections

    for option, value in (("instances", instances), ("length", length), ("batch-size", batch_size)):
        if value < 1:
            raise ValueError(f"{option} must be >= 1; got {value}")
    settings = Settings(sigma=sigma, seed=seed, certify=certify)
    views, texts = {}, {}
    for name, checkpoint in names(checkpoints).items():
        subject = open_subject(
            checkpoint,
            data,
            instances=instances,
            length=length,
            report=lambda line: typer.echo(line, err=True),
        )
        model = subject.model.to(torch.device(device))
        batches = subject.batches(batch_size, torch.device(device))
        trace = None
        if text != 0 and subject.images is None:
            trace = TextTrace(model, batches, domains=subject.domains, tokens=text)
        with progress_bars() as bars, trace.watching() if trace else nullcontext():
            steps = -(-subject.items // batch_size)
            records = collect(
                model,
                trace.batches() if trace else batches,
                domains=subject.domains,
                threshold=threshold,
                sample=sample,
                seed=seed,
                run=subject.run,
                report=partial(bars, f"{name}: data", total=steps),
            )
        with progress_bars() as bars:
            diagnosis = measure(
                records,
                domains=subject.domains,
                settings=settings,
                report=partial(bars, f"{name}: layers", total=len(records)),
            )
            if trace is not None:
                counted = partial(bars, f"{name}: text", total=len(records))
                texts[name] = trace.result(subject.tokenizer, counted)
                texts[name].save(out / name / "text.npz")
        if subject.images is not None:
            from l2r.diagnostics.patches import validation_patches
            from l2r.report.patches import write_patch_page

            routing = validation_patches(subject.model, subject.images, count=12)
            page = write_patch_page(out / name, routing, type(subject.model).__name__)
            typer.echo(f"patches: {page}", err=as_json)
        diagnosis.info["checkpoint"] = checkpoint
        diagnosis.save(out / name)
        views[name] = diagnosis
    if as_json:
        print_table(full_table(views), as_json=True)
    else:
        for table in checkpoint_tables(views):
            print_table(table)
    page = out / "index.html"
    write_diagnosis(views, page, opening=text_sections(texts, page))
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
