"""``l2r diagnose``: what the routers of one checkpoint or several do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from l2r.cli.options import (
    AsJson,
    BatchSize,
    Checkpoints,
    Data,
    Device,
    DeviceMap,
    Dtype,
    Length,
    Open,
    Revision,
    Rows,
    Text,
    TrustRemoteCode,
    at_least,
    check_one_source,
    out_option,
    read_text,
)
from l2r.cli.output import echo, say
from l2r.errors import InputError
from l2r.files.atomic import plain_json
from l2r.files.wording import named_path


def diagnose(
    checkpoints: Checkpoints,
    text: Text = None,
    data: Data = None,
    out: Annotated[Path, out_option("a folder for the page and the numbers")] = Path("diagnosis"),
    instances: Rows = 64,
    length: Length = 256,
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
            help="Compare earlier checkpoints' routing with the last one's: a run's or those given."
        ),
    ] = False,
    text_tokens: Annotated[
        int, typer.Option(help="Tokens of the data shown as text with their experts; 0 for none.")
    ] = 1024,
    generate: Annotated[
        int,
        typer.Option(
            help="Tokens that the model writes behind --text, in colors too.", callback=at_least(0)
        ),
    ] = 0,
    sigma: Annotated[float, typer.Option(help="Noise on router inputs.")] = 0.02,
    threshold: Annotated[float, typer.Option(help="Margins below it are low.")] = 0.2,
    seed: Annotated[
        int, typer.Option(help="Seed: of the sample, the noise and what is written.")
    ] = 0,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    open_: Open = False,
    as_json: AsJson = False,
) -> None:
    """Measure what the routers of MoE checkpoints do, on one page.

    Margins, robustness, certified radii, geometry and usage: runs every checkpoint on the same
    data, saves its diagnosis, prints a table, writes the page. With --text the routes of one text,
    of any length, in colors, in seconds.

    Example: l2r diagnose runs/demo/linear runs/demo/l2r_sips_tuned --out diagnosis
    """
    from l2r.analysis import Extent, earlier_checkpoints
    from l2r.analysis.diagnostics import DiagnosisSettings
    from l2r.files.atomic import check_place, make_folder
    from l2r.hf.checkpoints import Placement

    if text_tokens < 0:
        raise InputError(f"text_tokens must be >= 0; got {text_tokens}")
    check_one_source(text, data)
    if generate and text is None:
        raise InputError("generate goes with --text, which the model continues; got no --text")
    settings = DiagnosisSettings(sigma=sigma, seed=seed, certify=certify)
    extent = Extent(
        batch_size, sample, threshold, gain=gain, text=text_tokens, patches=12, settings=settings
    )
    placement, named = Placement(dtype, device, device_map, say), names(checkpoints)
    check_place(out)
    read = None if text is None else read_text(text)
    folders = _check(checkpoints, data, revision, own_text=read is not None, code=trust_remote_code)
    one_run = over_time and len(checkpoints) == 1
    earlier = earlier_checkpoints(checkpoints[0]) if one_run else []
    if read is not None:
        loading: Any = {"placement": placement, "revision": revision}
        loading |= {"trust_remote_code": trust_remote_code, "generate": generate, "seed": seed}
        _own_text(named, folders, read, out, loading, show=open_, as_json=as_json)
        return
    from l2r.analysis import announce, diagnose_checkpoint, reads_of_diagnosis
    from l2r.analysis.diagnostics import saturation_of_diagnoses
    from l2r.cli.console import print_pages, print_table, progress_bars
    from l2r.report.diagnosis import full_table, summary_table, write_diagnosis
    from l2r.report.patches import patch_links, write_patch_page
    from l2r.report.text_view import text_page_of, text_sections

    rows = [(at, reads_of_diagnosis(at, instances, length, extent, earlier)) for at in folders]
    announce(rows, placement, say, searched=certify, trust_remote_code=trust_remote_code)
    pages: list[Path] = []
    views, texts = {}, {}
    for name, checkpoint in named.items():
        folder = make_folder(out, name)
        with progress_bars() as bars:
            diagnosed = diagnose_checkpoint(
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
        diagnosed.save(folder)
        views[name] = diagnosed.diagnosis
        if diagnosed.text is not None:
            texts[name] = diagnosed.text
        if diagnosed.patches is not None:
            pages.append(write_patch_page(folder, diagnosed.patches, diagnosed.model))
    if over_time and not earlier:
        diagnosed.diagnosis.info["over_time"] = saturation_of_diagnoses(views)
        diagnosed.diagnosis.save(folder)
    page = out / "index.html"
    opening = [*text_sections(texts, page), *patch_links(pages, out)]
    write_diagnosis(views, page, texts=texts, opening=opening)
    print_table(full_table(views) if as_json else summary_table(views), as_json=as_json)
    pages = [page, *([text_page_of(page)] if texts else []), *pages]
    print_pages(pages, show=open_, err=as_json)


def _check(
    checkpoints: list[str], data: str | None, revision: str | None, *, own_text: bool, code: bool
) -> list[Path]:
    """Folders of the checkpoints; ValueError for one that is not there or cannot read the data."""
    from l2r.hf.checkpoints import (
        check_reads,
        check_reads_text,
        is_image_classifier,
        local_checkpoint,
    )

    folders = []
    for checkpoint in checkpoints:  # all of them before the first, which takes minutes
        folder = local_checkpoint(checkpoint, revision=revision, code=code)
        folders.append(folder)
        if not own_text:
            check_reads(folder, data)
        elif is_image_classifier(folder):
            raise InputError(f"text is for language models; {checkpoint} classifies images")
        else:
            check_reads_text(folder)
    return folders


def _own_text(
    named: dict[str, str],
    folders: list[Path],
    text: str,
    out: Path,
    loading: Any,
    *,
    show: bool,
    as_json: bool,
) -> None:
    """Route one text through every checkpoint; a page of all, a table or records of each."""
    from l2r.analysis import announce, reads_of_passages, route_text
    from l2r.cli.console import print_pages, print_table, progress_bars
    from l2r.report.own_text import own_text_records, own_text_table
    from l2r.report.text_view import write_text_page

    code = {"trust_remote_code": loading["trust_remote_code"]}
    written = loading["generate"]
    reads = [(folder, reads_of_passages(folder, text, written, **code)) for folder in folders]
    announce(reads, loading["placement"], say, **code)
    routed = {}
    with progress_bars() as bars:
        for done, (name, checkpoint) in enumerate(named.items()):
            bars("text", done, len(named), name)
            routed[name] = route_text(checkpoint, text, say=say, **loading)
        bars("text", len(named), len(named), "")
    starts = {
        name: read.length - written
        for name, (_, (read,)) in zip(named, reads, strict=True)
        if written and read.length is not None
    }
    page = write_text_page(routed, out / "text.html", written=starts)
    if as_json:
        records = {n: own_text_records(r, starts.get(n)) for n, r in routed.items()}
        echo(plain_json(records))
    else:
        for name, routing in routed.items():
            print_table(own_text_table(routing, name, starts.get(name)))
    print_pages([page], show=show, err=as_json)


def _progress(bars: Callable[..., None], name: str, what: str, done: int, total: int) -> None:
    bars(f"{name}: {what}", done, total)


def names(checkpoints: list[str]) -> dict[str, str]:
    """Name every checkpoint: its last folder, or more of the path where that repeats."""
    paths = [named_path(checkpoint) for checkpoint in checkpoints]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        short = ["-".join(path.parts[-depth:]).replace("/", "") for path in paths]
        if len(set(short)) == len(short):
            return dict(zip(short, checkpoints, strict=True))
    raise InputError(f"checkpoints must differ; got {', '.join(checkpoints)}")
