"""``l2r sweep``: a grid of runs, resumable cell by cell, and its ablation tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from l2r.cli.options import AsJson, Changes, Recipe, Seeds

if TYPE_CHECKING:
    from l2r.experiments.cells import Cell, Outcome
    from l2r.report.ablation import Row
    from l2r.report.tables import Table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "sweep",
        epilog="Example: l2r sweep demo/l2r-sips --grid router.rank=2,8,32 --seeds 3 "
        "training.steps=100",
        help="Train every cell of a grid with every seed and print the ablation tables. The same "
        "command goes on with an unfinished sweep; finished cells are not trained again.",
    )(sweep)


def sweep(
    recipe: Recipe,
    changes: Changes = None,
    grid: Annotated[
        list[str] | None, typer.Option(help="key.sub=value,value ...; give it once per field.")
    ] = None,
    seeds: Seeds = 1,
    out: Annotated[Path | None, typer.Option(help="Folder [default: runs/sweep/RECIPE].")] = None,
    launch: Annotated[
        str | None,
        typer.Option(help='Start each cell by this, e.g. "torchrun --nproc-per-node 8".'),
    ] = None,
    usage: Annotated[
        bool,
        typer.Option(help="Run each choice's first seed on its validation data for the heatmaps."),
    ] = True,
    plan: Annotated[bool, typer.Option("--plan", help="Show the cells; train nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the grid; exit code 1 when a cell failed."""
    import os

    from l2r.cli.console import print_table
    from l2r.experiments.cells import plan_cells, read_grid, run_cells
    from l2r.report.ablation import ablation_table, ablations, all_rows_table, sweep_table
    from l2r.report.sweep import write_sweep_page

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            'l2r sweep is one process; start its cells with --launch "torchrun --nproc-per-node N"'
        )
    cells = plan_cells(recipe, changes or [], read_grid(grid or []), seeds)
    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe
    root = out or Path("runs") / "sweep" / name
    if plan:
        print_table(_plan_table(cells, root), as_json=as_json)
        return
    outcomes: list["Outcome"] = []
    for outcome in run_cells(cells, root, launch=launch, report=_say):
        outcomes.append(outcome)
        if outcome.signal is not None:
            _say("stopped and saved; the same command goes on")
            raise typer.Exit(128 + outcome.signal)
        if outcome.error is not None:
            _say(f"failed: {outcome.cell.name}: {outcome.error}")
    failed = {o.cell.name: o.error for o in outcomes if o.error is not None}
    rows = sweep_rows(outcomes)
    if usage:
        _diagnose(rows, outcomes)
    if rows:
        found = ablations(rows)
        if as_json:
            print_table(sweep_table(rows), as_json=True)
        else:
            for table in [*map(ablation_table, found), all_rows_table(rows)]:
                print_table(table)
        page = write_sweep_page(rows, root / "report.html", failed=failed)
        typer.echo(f"report: {page}", err=as_json)
    if failed:
        _say(f"{len(failed)} of {len(cells)} cells failed; the same command tries them again")
        raise typer.Exit(1)


def sweep_rows(outcomes: "Sequence[Outcome]") -> "list[Row]":
    """The finished runs of each choice of the grid, with mean and interval over seeds."""
    from l2r.report.ablation import COLUMNS, Row, Spread, final_numbers
    from l2r.runs.folder import RunFolder
    from l2r.runs.statistics import mean_interval

    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.error is None:
            groups.setdefault(repr(outcome.cell.settings), []).append(outcome)
    rows = []
    for group in groups.values():
        runs: list[RunFolder] = [RunFolder(outcome.folder) for outcome in group]
        found = [final_numbers(run) for run in runs]
        numbers = {
            column: Spread(*mean_interval([values[column] for values in found]))
            for column in COLUMNS
            if all(column in values for values in found)
        }
        facts = runs[0].read_json(runs[0].environment)
        sizes = (facts.get("router_parameters"), facts.get("linear_router_parameters"))
        rows.append(Row(group[0].cell.settings, runs, numbers, *sizes))
    return rows


def _diagnose(rows: "Sequence[Row]", outcomes: "Sequence[Outcome]") -> None:
    """diagnostics.json of each row's first run; a run that cannot be read is named and left out."""
    from l2r.experiments.measure import diagnose_run

    recipes = {outcome.folder: outcome.cell.recipe for outcome in outcomes}
    for run in (row.runs[0] for row in rows):
        if not run.diagnostics.is_file():
            try:
                run.write_json(run.diagnostics, diagnose_run(run, recipes[run.path]))
            except (ValueError, OSError) as error:
                _say(f"no heatmap of {run.name}: {' '.join(str(error).split())}")


def _plan_table(cells: "Sequence[Cell]", root: Path) -> "Table":
    from l2r.experiments.cells import is_finished
    from l2r.report.tables import Table
    from l2r.runs.folder import RunFolder

    rows = []
    for cell in cells:
        run = RunFolder(root / cell.name)
        started = "unfinished" if run.is_run() else "new"
        state = "finished" if is_finished(run, cell.recipe) else started
        last = (run.read_metrics("train") or [{"step": 0}])[-1]["step"]
        rows.append((cell.name, state, last))
    return Table(f"Cells in {root}", ("cell", "state", "last step"), tuple(rows))


def _say(line: str) -> None:
    typer.echo(line, err=True)
