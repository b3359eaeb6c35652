"""``l2r sweep``: a grid of runs, resumable cell by cell, and its ablation tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from l2r.cli.experiment import Launch, Processes, check_inputs, diagnose_all, end, run_all
from l2r.cli.options import AsJson, Changes, Open, Recipe, Seeds, out_option
from l2r.report.tables import Table

if TYPE_CHECKING:
    from l2r.studies import Cell, Outcome


def sweep(
    recipe: Recipe,
    changes: Changes = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="key.sub=value,value ...; give it once per field.")
    ] = None,
    seeds: Seeds = 1,
    out: Annotated[Path | None, out_option("a folder of runs (default: runs/sweep/RECIPE)")] = None,
    launch: Launch = None,
    processes: Processes = None,
    usage: Annotated[
        bool,
        typer.Option(help="Run each choice's first seed on its validation data for the heatmaps."),
    ] = True,
    show: Annotated[bool, typer.Option("--show", help="Print and exit: the cells.")] = False,
    open_: Open = False,
    as_json: AsJson = False,
) -> None:
    """Train every cell of a grid with every seed and print the ablation tables. The same
    command resumes an unfinished sweep; finished cells are not trained again.

    Exit code 1 when a cell failed.

    Example: l2r sweep demo/l2r-sips --grid router.rank=2,8,32 --seeds 3 training.steps=100
    """
    from l2r.runs.atomic import check_place
    from l2r.studies import grid_cells, read_grid

    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe
    root = out or Path("runs") / "sweep" / name
    axes = read_grid(grid or [])
    if not show:
        check_place(root)
        check_inputs(recipe, changes or [])
    cells = grid_cells(recipe, changes or [], axes, seeds)
    from l2r.cli.console import print_pages, print_table
    from l2r.report.ablation import ablation_table, ablations, all_rows_table, seed_row, sweep_table
    from l2r.report.sweep import write_sweep_page

    if show:
        print_table(_plan_table(cells, root), as_json=as_json)
        return
    finished, failed = run_all(cells, root, launch=launch, processes=processes)
    arms: dict[str, list[Outcome]] = {}
    for outcome in finished:
        arms.setdefault(outcome.cell.arm, []).append(outcome)
    if usage:
        diagnose_all(arm[0] for arm in arms.values())
    rows = [seed_row(arm[0].cell.settings, [o.run for o in arm]) for arm in arms.values()]
    if rows:
        groups = ablations(rows)
        if as_json:
            print_table(sweep_table(rows), as_json=True)
        else:
            for table in [all_rows_table(rows), *map(ablation_table, groups)]:
                print_table(table)
        page = write_sweep_page(rows, root / "report.html", failed=failed)
        print_pages([page], show=open_, err=as_json)
    end(failed, cells)


def _plan_table(cells: "Sequence[Cell]", root: Path) -> Table:
    from l2r.studies import is_finished

    rows = []
    for cell in cells:
        run = cell.run(root)
        started = "unfinished" if run.is_run() else "new"
        state = "finished" if is_finished(run, cell.recipe) else started
        last = (run.read_metrics("train") or [{"step": 0}])[-1]["step"]
        rows.append((cell.name, state, last))
    return Table(f"Cells in {root}", ("cell", "state", "last step"), tuple(rows))
