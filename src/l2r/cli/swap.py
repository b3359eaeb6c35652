"""``l2r swap``: put a router into a checkpoint, or run every supported family through a swap."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from l2r.report.tables import Table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "swap",
        epilog="Example: l2r swap my-olmoe --router l2r_sips --rank 2 --heads 16 --out my-l2r",
        help="Replace the routers of a Hugging Face MoE checkpoint; everything else stays. "
        "With --families: check all supported families with tiny random models.",
    )(swap)


def swap(
    checkpoint: Annotated[str | None, typer.Argument(help="Folder in Hugging Face format.")] = None,
    router: Annotated[str, typer.Option(help="Router to put in.")] = "l2r_sips",
    rank: Annotated[int | None, typer.Option(help="Rank r of the routing query.")] = None,
    heads: Annotated[int | None, typer.Option(help="Anchors H per expert.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Further name=value.")] = None,
    layers: Annotated[str | None, typer.Option(help="Indices like 0,3,5 [all].")] = None,
    selection: Annotated[
        str, typer.Option(help="family: keep the family's rule; router: the router's own.")
    ] = "family",
    out: Annotated[Path | None, typer.Option(help="New folder for the checkpoint.")] = None,
    families: Annotated[bool, typer.Option("--families", help="Check the families.")] = False,
    only: Annotated[str | None, typer.Option(help="Families to check, by commas.")] = None,
    write: Annotated[Path | None, typer.Option(help="Write the table as Markdown.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print records as JSON.")] = False,
) -> None:
    """Swap one checkpoint, or print the table of families."""
    from l2r.cli.console import print_table

    if families:
        table = family_table(only)
        if write is not None:
            from l2r.data.atomic import write_text

            write_text(write, family_page(table))
        print_table(table, as_json=as_json)
        return
    if checkpoint is None or out is None:
        raise ValueError("swap needs CHECKPOINT and --out FOLDER, or --families")
    from l2r.cli.router_options import layer_list, router_config
    from l2r.models import load_causal_lm, swap_routers
    from l2r.models.pretrained import check_new_folder, save_model
    from l2r.models.swap import router_sites

    config = router_config(router, rank, heads, option or [])
    check_new_folder(out)
    model, tokenizer = load_causal_lm(checkpoint, dtype="auto")
    before = {site.path: site for site in router_sites(model)}
    swap_routers(model, config, layers=layer_list(layers), selection=selection)
    save_model(model, out, tokenizer=tokenizer)
    print_table(_swap_table(model, before, config.kind), as_json=as_json)
    typer.echo(f"saved: {out}; load it with l2r.load_pretrained({str(out)!r})", err=as_json)


def family_table(only: str | None) -> "Table":
    """Check the families one after another, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import track

    from l2r.models.families import FAMILIES
    from l2r.models.family_check import COLUMNS, check_families
    from l2r.models.loading import hide_progress_bars
    from l2r.report.tables import Table

    names = list(FAMILIES) if only is None else only.split(",")
    hide_progress_bars()
    results = track(
        check_families(names), "families", total=len(names), console=Console(stderr=True)
    )
    rows = []
    for result in results:
        outcome = [getattr(result, column) for column in COLUMNS[1:]]
        rows.append((result.family, *("yes" if works else "no" for works in outcome)))
    return Table("Router swap by model family", COLUMNS, tuple(rows))


def family_page(table: "Table") -> str:
    """docs/families.md."""
    from importlib.metadata import version

    from l2r.models.families import REFUSED

    versions = f"transformers {version('transformers')}, torch {version('torch')}"
    refused = "".join(f"- `{name}`: {reason}.\n" for name, reason in REFUSED.items())
    return _PAGE.format(versions=versions, table=table.to_markdown(), refused=refused)


_PAGE = """# Model families

Made by `l2r swap --families --write docs/families.md` with {versions} on a CPU. Every column was
run with a small random model of the family:

- `same_rule`: a linear router of ours with the old router's weights gives the old model's logits
  (to 1e-5), so the family's selection rule was kept.
- `swap`: the L2R router is seen by `capture`, and `output_router_logits=True` returns its logits.
- `train_step`: one SGD step on the language-modelling loss moves every router parameter and
  lowers the loss.
- `generate`: greedy generation with the cache equals generation without.
- `reload`: `save_pretrained`, then `l2r.load_pretrained` in another process: bit-equal logits.
- `compile`: `torch.compile(fullgraph=True)` gives the same logits (traced by AOTAutograd, experts
  as `batched_mm`, which compiles on CPUs in fp32).

{table}
Refused, with the reason the error gives:

{refused}"""


def _swap_table(model: Any, before: dict[str, Any], kind: str) -> "Table":
    from l2r.report.tables import Table
    from l2r.routers import Router

    rows = []
    for path, site in before.items():
        router = model.get_submodule(path)
        swapped = router is not site.router
        ours = isinstance(router, Router)
        rows.append(
            (
                site.layer,
                path,
                type(site.router).__name__,
                kind if swapped else "kept",
                sum(p.numel() for p in site.router.parameters()),
                sum(p.numel() for p in router.parameters()),
                str(router.selection) if ours and router.selection.family else "own",
            )
        )
    columns = (
        "layer",
        "module",
        "old router",
        "router",
        "old parameters",
        "parameters",
        "selection",
    )
    return Table("Routers", columns, tuple(rows))
