"""``l2r diagnose``: what the routers of one checkpoint or several do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from l2r.cli.experiment import say
from l2r.cli.options import (
    AsJson,
    BatchSize,
    Device,
    DeviceMap,
    Dtype,
    Revision,
    TrustRemoteCode,
)


def diagnose(
    checkpoints: Annotated[
        list[str],
        typer.Argument(help="Hugging Face folders, run folders or hub ids, compared in order."),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="File or folder of text, or token files (default: the embedded corpus); for "
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
        int,
        typer.Option(
            help="Sequences (of images up to 2,048) whose loss is taken with other experts too; "
            "0 for none."
        ),
    ] = 16,
    over_time: Annotated[
        bool,
        typer.Option(
            help="How far earlier checkpoints choose as the last: of one run, or those given."
        ),
    ] = False,
    text: Annotated[
        int, typer.Option(help="Tokens shown as text with their experts; 0 for none.")
    ] = 1024,
    sigma: Annotated[float, typer.Option(help="Noise on router inputs.")] = 0.02,
    threshold: Annotated[float, typer.Option(help="Margins below it are low.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Of the sample and the noise.")] = 0,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Margins, robustness, certified radii, geometry and usage of any MoE checkpoint.

    Runs every checkpoint on the same data, saves its diagnosis, prints tables, writes the page.

    Example: l2r diagnose runs/demo/linear runs/demo/l2r_sips --out diagnosis
    """
    from l2r.analysis.conductor import Extent, diagnose_checkpoint, earlier_checkpoints
    from l2r.analysis.diagnostics.diagnose import Settings
    from l2r.analysis.diagnostics.over_time import of_diagnoses
    from l2r.cli.console import progress_bars
    from l2r.hf.checkpoints.placement import Placement
    from l2r.report.diagnosis import write_diagnosis
    from l2r.report.patches import write_patch_page
    from l2r.report.text_view import text_sections
    from l2r.runs.atomic import make_folder

    settings = Settings(sigma=sigma, seed=seed, certify=certify)
    extent = Extent(
        batch_size, sample, threshold, gain=gain, text=text, patches=12, settings=settings
    )
    one_run = over_time and len(checkpoints) == 1
    earlier = earlier_checkpoints(checkpoints[0]) if one_run else []
    placement, views, texts = Placement(dtype, device, device_map, say), {}, {}
    for name, checkpoint in names(checkpoints).items():
        folder = make_folder(out, name)
        with progress_bars() as bars:
            found = diagnose_checkpoint(
                checkpoint,
                data,
                instances=instances,
                length=length,
                extent=extent,
                earlier=earlier,
                placement=placement,
                revision=revision,
                trust_remote_code=trust_remote_code,
                report=partial(_progress, bars, name),
                say=say,
            )
        found.save(folder)
        views[name] = found.diagnosis
        if found.text is not None:
            texts[name] = found.text
        if found.patches is not None:
            patches = write_patch_page(folder, found.patches, found.model)
            typer.echo(f"patches: {patches}", err=as_json)
    if over_time and not earlier:
        found.diagnosis.info["over_time"] = of_diagnoses(views)
        found.diagnosis.save(folder)
    page = out / "index.html"
    write_diagnosis(views, page, opening=text_sections(texts, page))
    _show(views, as_json)
    typer.echo(f"page: {page}", err=as_json)


def _progress(bars: Callable[..., None], name: str, what: str, done: int, total: int) -> None:
    bars(f"{name}: {what}", done, total)


def _show(views: Any, as_json: bool) -> None:
    from l2r.cli.console import print_table
    from l2r.report.diagnosis import checkpoint_tables, full_table

    for table in [full_table(views)] if as_json else checkpoint_tables(views):
        print_table(table, as_json=as_json)


def names(checkpoints: list[str]) -> dict[str, str]:
    """A name for every checkpoint: its last folder, or more of the path where that repeats."""
    paths = [Path(checkpoint).resolve() for checkpoint in checkpoints]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        short = ["-".join(path.parts[-depth:]).replace("/", "") for path in paths]
        if len(set(short)) == len(short):
            return dict(zip(short, checkpoints, strict=True))
    raise ValueError(f"checkpoints must differ; got {', '.join(checkpoints)}")
