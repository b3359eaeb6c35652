"""``l2r compare``: train several recipes alike, look at their routers, write one report."""

from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.experiment import Launch, Processes, check_inputs, diagnose_all, end, run_all
from l2r.cli.options import AsJson, Changes, Open, Seeds, out_option


def compare(
    recipes: Annotated[
        str, typer.Argument(help="Packaged folder of recipes, e.g. demo: train each.")
    ],
    changes: Changes = None,
    routers: Annotated[
        str | None, typer.Option(help="Only these routers, separated by commas.")
    ] = None,
    seeds: Seeds = 1,
    out: Annotated[Path | None, out_option("a folder of runs (default: runs/RECIPES)")] = None,
    launch: Launch = None,
    processes: Processes = None,
    open_: Open = False,
    as_json: AsJson = False,
) -> None:
    """Train every recipe of a packaged folder on the same batches and compare routers.

    Runs that are finished are not trained again.

    Example: l2r compare demo training.steps=100 --routers linear,l2r_sips
    """
    from l2r.runs.atomic import check_place
    from l2r.studies import folder_cells
    from l2r.training.recipes import recipes_in

    root = out or Path("runs") / recipes
    first, *_ = recipes_in(recipes)
    check_place(root)
    check_inputs(first, changes or [])
    cells = folder_cells(recipes, changes or [], routers.split(",") if routers else None, seeds)
    from l2r.cli.console import print_pages, print_table
    from l2r.report.comparison import first_seeds, write_report

    finished, failed = run_all(cells, root, launch=launch, processes=processes)
    runs = [outcome.run for outcome in finished]
    if runs:
        shown = first_seeds(runs)
        diagnose_all(outcome for outcome in finished if outcome.run in shown)
        table, pages = write_report(runs, root / "report.html")
        print_table(table, as_json=as_json)
        print_pages(pages, show=open_, err=as_json)
    end(failed, cells)
