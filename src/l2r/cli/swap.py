"""``l2r swap``: put a router into a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from l2r.cli.options import (
    NEW_FOLDER,
    AsJson,
    Layers,
    RouterChanges,
    TrustRemoteCode,
    read_layers,
    read_router,
)
from l2r.report.tables import Table

if TYPE_CHECKING:
    from l2r.swap.swap import Site


def swap(
    checkpoint: Annotated[Path, typer.Argument(help="Folder in Hugging Face format.")],
    changes: RouterChanges = None,
    *,
    out: Annotated[Path, NEW_FOLDER],
    layers: Layers = None,
    selection: Annotated[
        str, typer.Option(help="family: keep the family's rule; router: the router's own.")
    ] = "family",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Replace the routers of a Hugging Face MoE checkpoint or run; everything else stays.

    Prints what stands in every layer.

    Example: l2r swap my-olmoe router.kind=l2r_sips rank=2 heads=16 --out my-l2r
    """
    from l2r.checkpoints import load_pretrained
    from l2r.checkpoints.loading import load_tokenizer
    from l2r.checkpoints.pretrained import check_new_folder, save_model
    from l2r.cli.console import print_table
    from l2r.swap import swap_routers
    from l2r.swap.swap import router_sites

    config = read_router(changes)
    check_new_folder(out)
    trusted = {"trust_remote_code": trust_remote_code}
    model = load_pretrained(checkpoint, dtype="auto", **trusted)
    tokenizer = load_tokenizer(checkpoint, **trusted)
    before = router_sites(model)
    swap_routers(model, config, layers=read_layers(layers), selection=selection)
    made = (
        "## How it was made\n\n`l2r swap` put untrained routers into "
        f"{checkpoint.resolve().name}; its other weights are unchanged. Train it before use."
    )
    save_model(model, out, tokenizer=tokenizer, sections=[made])
    print_table(_table(model, before, config.kind), as_json=as_json)
    typer.echo(f"saved: {out}; load it with l2r.load_pretrained({str(out)!r})", err=as_json)


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
        kept = isinstance(router, Router) and router.selection.family
        rows.append(
            (
                site.layer,
                site.path,
                type(site.router).__name__,
                "kept" if router is site.router else kind,
                sum(p.numel() for p in site.router.parameters()),
                sum(p.numel() for p in router.parameters()),
                str(router.selection) if kept else "own",
            )
        )
    return Table("Routers", columns, tuple(rows))
