"""``l2r compare``: train several recipes alike, look at their routers, write one report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from l2r.cli.options import AsJson, Changes, Open, Seeds, out_option
from l2r.cli.output import say
from l2r_lab.cli.experiment import (
    Launch,
    Processes,
    WorkerOf,
    check_inputs,
    diagnose_all,
    end,
    run_all,
)

if TYPE_CHECKING:
    from l2r_lab.studies import Outcome


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
    worker_of: WorkerOf = None,
    open_: Open = False,
    as_json: AsJson = False,
) -> None:
    """Train every recipe of a packaged folder on the same batches and compare routers.

    Runs that are finished are not trained again.

    Example: l2r compare demo training.steps=100 --routers linear,l2r_sips
    """
    from l2r.files.atomic import check_place
    from l2r_lab.studies import folder_cells
    from l2r_lab.training.recipes import recipes_in

    root = out or Path("runs") / recipes
    first, *_ = recipes_in(recipes)
    check_place(root)
    check_inputs(first, changes or [])
    cells = folder_cells(recipes, changes or [], routers.split(",") if routers else None, seeds)
    from l2r.cli.console import print_pages, print_table
    from l2r_lab.report.comparison import write_report

    page, done = root / "report.html", list["Outcome"]()

    def grow(outcome: "Outcome") -> None:
        done.append(outcome)
        if outcome.trained and len(done) < len(cells):
            diagnose_all(_shown(done, [outcome]))
            write_report([one.run for one in done], page)
            say(f"{page} shows {len(done)} of {len(cells)} runs and grows: open it, load it again")

    command = ["compare", recipes, *(changes or []), "--seeds", str(seeds), "--out", str(root)]
    command += ["--routers", routers] if routers else []
    ways: Any = {"launch": launch, "processes": processes, "share": worker_of, "ended": grow}
    finished, failed = run_all(cells, root, command, **ways)
    runs = [outcome.run for outcome in finished]
    if runs:
        diagnose_all(_shown(finished, finished))
        table, pages = write_report(runs, page)
        print_table(table, as_json=as_json)
        print_pages(pages, show=open_, err=as_json)
    end(failed, cells)


def _shown(finished: "list[Outcome]", among: "list[Outcome]") -> "list[Outcome]":
    """Those among some outcomes whose run the report shows: one seed of each recipe."""
    from l2r_lab.report.comparison import first_seeds

    shown = first_seeds([outcome.run for outcome in finished])
    return [outcome for outcome in among if outcome.run in shown]
