"""``l2r families``: every supported model family through a swap, as a table."""

from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.options import AsJson
from l2r.report.tables import Table


def families(
    only: Annotated[str | None, typer.Option(help="Families to check, by commas.")] = None,
    write: Annotated[Path | None, typer.Option(help="Also write the page as Markdown.")] = None,
    as_json: AsJson = False,
) -> None:
    """Swap the routers of tiny random models of all supported families, and check them.

    Example: l2r families --only olmoe,mixtral --json
    """
    from rich.console import Console
    from rich.progress import track

    from l2r.cli.console import print_table
    from l2r.hf.checkpoints.family_check import COLUMNS, check_families
    from l2r.hf.swap.families import FAMILIES
    from l2r.runs.atomic import write_text

    names = list(FAMILIES) if only is None else only.split(",")
    results = track(
        check_families(names), "families", total=len(names), console=Console(stderr=True)
    )
    rows = []
    for result in results:
        outcome = [getattr(result, column) for column in COLUMNS[1:]]
        rows.append((result.family, *("yes" if works else "no" for works in outcome)))
    whole = sum(all(cell == "yes" for cell in row[1:]) for row in rows)
    verdict = f"{whole} of {len(rows)} families pass every check."
    table = Table("Router swap by model family", COLUMNS, tuple(rows), verdict=verdict)
    if write is not None:
        write_text(write, _page(table))
    print_table(table if as_json else _short(table), as_json=as_json)


def _short(table: Table) -> Table:
    """The checks that each family passes and fails, in three columns."""
    rows = []
    for name, *cells in table.rows:
        failed = [c for c, cell in zip(table.columns[1:], cells, strict=True) if cell != "yes"]
        rows.append((name, f"{len(cells) - len(failed)} of {len(cells)}", ", ".join(failed) or "-"))
    columns = ("family", "checks passed", "failed")
    return Table(table.title, columns, tuple(rows), verdict=table.verdict)


def _page(table: Table) -> str:
    """docs/families.md."""
    from importlib.metadata import version

    from l2r.hf.swap.families import REFUSED

    versions = f"transformers {version('transformers')}, torch {version('torch')}"
    refused = "".join(f"- `{name}`: {reason}.\n" for name, reason in REFUSED.items())
    return _PAGE.format(versions=versions, table=table.to_markdown(), refused=refused)


_PAGE = """# Model families

Made by `l2r families --write docs/families.md` with {versions} on a CPU. Every column was
run with a small random model of the family:

- `same_rule`: a linear router of ours with the old router's weights gives the old model's logits
  (to 1e-5), so the family's selection rule was kept.
- `swap`: the L2R router is seen by `capture`, and `output_router_logits=True` returns its logits.
- `train_step`: one SGD step on the language-modeling loss moves every router parameter and
  lowers the loss.
- `generate`: greedy generation with the cache equals generation without.
- `reload`: `save_pretrained`, then `l2r.load_pretrained` in another process: bit-equal logits.
- `compile`: `torch.compile(fullgraph=True)` gives the same logits (traced by AOTAutograd, experts
  as `batched_mm`, which compiles on CPUs in fp32).

{table}
Refused, with the reason the error gives:

{refused}"""
