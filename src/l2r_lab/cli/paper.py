"""``l2r paper``: every table and figure of the paper from what its commands have made."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from l2r.cli.options import Open, must_exist, out_option
from l2r.cli.output import say
from l2r_lab.cli.data import plan_table
from l2r_lab.cli.landscape import paper_landscapes

if TYPE_CHECKING:
    from l2r_lab.report.paper_items import Content, Item
    from l2r_lab.report.paper_sources import PaperSources

_RANKS, _HEADS = (2, 4, 8, 16, 32), (1, 2, 4, 8, 16)


def paper(
    work: Annotated[
        Path,
        typer.Argument(
            help="Folder in which the commands of the page Re-run the paper ran.",
            callback=must_exist,
        ),
    ] = Path(),
    out: Annotated[Path, out_option("a folder, a page and a JSON file for each item")] = Path(
        "paper"
    ),
    open_: Open = False,
) -> None:
    """Write Tables 1 to 11 and 14 and Figures 2 to 16 of the paper, each in files of its name.

    What cannot be made yet is named, with what it lacks, and the exit code is 1.

    Example: l2r paper --out paper
    """
    from l2r.files.atomic import check_place

    check_place(out)
    from l2r.cli.console import print_pages
    from l2r_lab.report.paper_items import write_items
    from l2r_lab.report.paper_sources import PaperSources

    items = all_items()
    made, missing = write_items(items, PaperSources(work), out)
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    if made:
        print_pages([out / "index.html"], show=open_)
    if missing:
        say(f"{len(missing)} of {len(items)} tables and figures are missing")
        raise typer.Exit(1)


def all_items() -> "list[Item]":
    """Make the list of all items, tables first, by their numbers."""
    from l2r_lab.report.paper_items import items_of_runs

    return sorted([*items_of_runs(), *_others()], key=_place)


def _place(item: "Item") -> tuple[bool, int]:
    kind, number = item.name.split()
    return kind == "Figure", int(number)


def _others() -> "list[Item]":
    """Items without a run: what the library computes and the plan of the data."""
    from l2r_lab.report.paper_items import Item

    def landscape(number: int) -> "Content":
        (figure,) = paper_landscapes()[number].parts
        return figure

    return [
        Item("Table 9", "router parameters", _router_parameters),
        Item("Table 11", "subset of the mixture", _subset),
        Item("Figure 3", "score landscapes", lambda _: landscape(0)),
        Item("Figure 8", "effect of beta under a fixed anchor", lambda _: landscape(1)),
    ]


def _router_parameters(_: "PaperSources") -> "Content":
    from l2r.routers.count import router_parameters
    from l2r_lab.report.paper_tables import parameter_table

    sizes = {"hidden_size": 2048, "num_experts": 64}
    cells = {
        (rank, heads): 16 * router_parameters("l2r_sips", **sizes, rank=rank, heads=heads)
        for rank in _RANKS
        for heads in _HEADS
    }
    return parameter_table(cells, 16 * router_parameters("linear", **sizes))


def _subset(sources: "PaperSources") -> "Content":
    from l2r.errors import InputError
    from l2r_lab.report.paper_sources import PLAN
    from l2r_lab.training.data import read_plan

    path = sources.folder / PLAN
    if not path.is_file():
        raise InputError(f"there is no {PLAN}; l2r data plan --out {PLAN} writes it")
    return plan_table(read_plan(path))
