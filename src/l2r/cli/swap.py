"""``l2r swap``: put a router into a checkpoint."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from l2r.cli.experiment import say
from l2r.cli.options import (
    NEW_FOLDER,
    AsJson,
    Checkpoint,
    Device,
    DeviceMap,
    Dtype,
    Layers,
    Revision,
    RouterChanges,
    TrustRemoteCode,
    read_layers,
    read_router,
)
from l2r.report.tables import Table
from l2r.runs.plain_json import plain_json

if TYPE_CHECKING:
    from l2r.hf.swap import Site
    from l2r.training import FitReport


def swap(
    checkpoint: Checkpoint,
    changes: RouterChanges = None,
    *,
    out: Annotated[Path, NEW_FOLDER],
    layers: Layers = None,
    selection: Annotated[
        Literal["family", "router"],
        typer.Option(help="family: keep the family's rule; router: the router's own."),
    ] = "family",
    fit: Annotated[
        str | None,
        typer.Option(help="Fit the new routers to the old ones on a folder of text, or embedded."),
    ] = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Replace the routers of a Hugging Face MoE checkpoint or run; everything else stays.

    Prints what stands in every layer; with --fit, agreement with the old routers and perplexity
    before, after the swap and after the fit, on text that the fit has not seen. Without options the
    new routers are those of L2RConfig.for_experts.

    Example: l2r swap my-olmoe router.kind=l2r_sips rank=8 heads=4 gamma=4 --fit my-text --out new
    """
    from l2r.cli.fitting import EMBEDDED
    from l2r.hf.checkpoints import Placement, check_reads_text, local_checkpoint
    from l2r.runs.atomic import check_new_folder

    placement, chosen, result = Placement(dtype, device, device_map, say), read_layers(layers), None
    if fit not in (None, EMBEDDED) and not Path(fit).exists():
        raise ValueError(f"fit must be a folder of text or {EMBEDDED}; got {fit}")
    check_new_folder(out)
    folder = local_checkpoint(checkpoint, revision=revision, code=trust_remote_code)
    if fit is not None:
        check_reads_text(folder)
    options = read_router(changes)

    from l2r.cli.console import progress_bars
    from l2r.cli.fitting import fit_to_old
    from l2r.hf.checkpoints import (
        CheckpointOnDisk,
        checkpoint_folder,
        load_model,
        load_tokenizer,
        processor_files,
        save_model,
    )
    from l2r.hf.models import check_parts, check_source, check_whole
    from l2r.hf.swap import (
        preferred_router,
        replace_routers,
        router_sites,
        select_sites,
    )

    source = checkpoint_folder(folder)
    check_source(source, checkpoint)
    placement = placement.here()
    as_stored = fit is None and dtype == "auto" and not trust_remote_code
    on_disk = CheckpointOnDisk.open(folder) if as_stored else None
    if on_disk is not None:
        model, tokenizer, save = on_disk.model, load_tokenizer(folder), on_disk.save
    else:
        model, tokenizer = load_model(
            folder, placement=placement, trust_remote_code=trust_remote_code
        )
        save = partial(save_model, model, unchanged=source if dtype == "auto" else None)
    before, sites = router_sites(model), select_sites(model, chosen)
    replaced = [site.path for site in sites]
    if on_disk is not None:
        check_parts(model, source, checkpoint)
    else:
        check_whole(model, source, checkpoint, replaced=replaced, rounded=dtype != "auto")
    config = preferred_router(model, sites[0], selection=selection, options=options)
    if fit is None:
        replace_routers(model, config, layers=chosen, selection=selection)
        text = "untrained routers into {}; its other weights are {}. Train it before use."
    else:
        data = None if fit == EMBEDDED else Path(fit)
        result = fit_to_old(
            folder, model, tokenizer, config, data=data, layers=chosen, selection=selection
        )
        text = "new routers into {} and fitted them to its own; its other weights are {}."
    others = "unchanged" if dtype == "auto" else f"in {dtype}"
    named = Path(checkpoint).resolve().name
    card = f"## How it was made\n\n`l2r swap` put {text.format(named, others)}"
    with progress_bars() as bars:
        watched = {} if on_disk is None else {"report": partial(bars, "files")}
        files = processor_files(folder)
        save(out, tokenizer=tokenizer, files=files, sections=[card], **watched)
    _print(_table(model, before, config.kind), result, config.kind, as_json=as_json)
    typer.echo(f"saved: {out}; load it with l2r.load_pretrained({str(out)!r})", err=as_json)


def _print(table: Table, fitted: "FitReport | None", kind: str, *, as_json: bool) -> None:
    """What stands in every layer, and how well the new routers choose as the old ones did."""
    from l2r.cli.console import print_table
    from l2r.cli.fitting import fit_tables
    from l2r.hf.swap import UNTRAINED_WARNING

    if fitted is None:
        print_table(table, as_json=as_json)
        typer.echo(f"warning: {UNTRAINED_WARNING}", err=True)
    elif as_json:
        typer.echo(plain_json({"routers": table.records(), **asdict(fitted)}))
    else:
        for shown in (table, *fit_tables(fitted, kind)):
            print_table(shown)


def _table(model: Any, before: "list[Site]", kind: str) -> Table:
    """A row per layer: the router that was there, and the one that is."""
    from l2r.routers import Router

    columns = (
        "layer",
        "module",
        "old router",
        "router",
        "old parameters",
        "parameters",
        "selection",
    )
    rows = []
    for site in before:
        router = model.get_submodule(site.path)
        family = isinstance(router, Router) and router.selection.family
        rows.append(
            (
                site.layer,
                site.path,
                type(site.router).__name__,
                "kept" if router is site.router else kind,
                sum(p.numel() for p in site.router.parameters()),
                sum(p.numel() for p in router.parameters()),
                str(router.selection) if family else "own",
            )
        )
    changed = sum(row[3] != "kept" for row in rows)
    few = ("old router", "router", "old parameters", "parameters", "selection")
    verdict = f"{changed} of {len(rows)} routers are {kind} now."
    return Table("Routers", columns, tuple(rows), few=few, verdict=verdict)
