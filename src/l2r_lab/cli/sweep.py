"""``l2r sweep``: a grid of runs, resumable cell by cell, and its ablation tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from l2r.cli.options import (
    AsJson,
    BatchSize,
    Changes,
    Dtype,
    Open,
    Recipe,
    Seeds,
    at_least,
    must_exist,
    out_option,
)
from l2r.errors import InputError
from l2r.report.tables import Table
from l2r_lab.cli.experiment import (
    Launch,
    Processes,
    WorkerOf,
    check_inputs,
    diagnose_all,
    end,
    evaluate_all,
    run_all,
)

if TYPE_CHECKING:
    from l2r_lab.studies import Cell, Outcome
    from l2r_lab.training.evaluation import TaskSettings


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
    worker_of: WorkerOf = None,
    usage: Annotated[
        bool,
        typer.Option(help="Run each choice's first seed on its validation data for the heatmaps."),
    ] = True,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(
            help="A run, or a folder of runs: what is finished there is not trained again; "
            "repeated for more.",
            callback=must_exist,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="paper, mmlu, or names: evaluate each finished run as l2r eval does."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="First scored answers of each task; the paper's numbers fit 1024.",
            callback=at_least(1),
        ),
    ] = None,
    batch_size: BatchSize = 8,
    dtype: Dtype = "auto",
    show: Annotated[bool, typer.Option("--show", help="Print and exit: the cells.")] = False,
    open_: Open = False,
    as_json: AsJson = False,
) -> None:
    """Train every cell of a grid with every seed and print the ablation tables. The same
    command resumes an unfinished sweep; finished cells are not trained again, and with --reuse
    neither are runs of other folders that differ in no field of their recipe.

    Exit code 1 when a cell failed.

    Example: l2r sweep demo/l2r-sips --grid router.rank=2,8,32 --seeds 3 training.steps=100
    """
    from l2r.files.atomic import check_place
    from l2r_lab.studies import grid_cells, read_grid

    settings = _task_settings(tasks, requests, dtype)
    name = Path(recipe).stem if recipe.endswith((".yaml", ".yml")) else recipe
    root = out or Path("runs") / "sweep" / name
    axes = read_grid(grid or [])
    if not show:
        check_place(root)
        check_inputs(recipe, changes or [])
    cells = grid_cells(recipe, changes or [], axes, seeds)
    if tasks is not None and cells[0].recipe.task != "language":
        raise InputError(f"tasks is for language; got tasks={tasks} for recipe {recipe}")
    cells = _with_reused(cells, root, reuse or [])
    from l2r.cli.console import print_pages, print_table
    from l2r_lab.report.ablation import (
        ablation_table,
        ablations,
        all_rows_table,
        seed_row,
        sweep_table,
    )
    from l2r_lab.report.sweep import write_sweep_page

    if show:
        print_table(_plan_table(cells, root), as_json=as_json)
        return
    command = ["sweep", recipe, *(changes or []), "--seeds", str(seeds), "--out", str(root)]
    command += [word for axis in grid or [] for word in ("--grid", axis)]
    command += [word for path in reuse or [] for word in ("--reuse", str(path))]
    ways: Any = {"launch": launch, "processes": processes, "share": worker_of}
    finished, failed = run_all(cells, root, command, **ways)
    arms: dict[str, list[Outcome]] = {}
    for outcome in finished:
        arms.setdefault(outcome.cell.arm, []).append(outcome)
    if usage:
        diagnose_all(arm[0] for arm in arms.values())
    if tasks is not None:
        evaluate_all(finished, tasks, settings, batch_size)
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


def _task_settings(tasks: str | None, requests: int | None, dtype: str) -> "TaskSettings":
    """Read settings of the evaluation. Raises ValueError for an unknown task."""
    from l2r_lab.training.evaluation import TaskSettings, select_tasks

    if tasks is not None:
        select_tasks(tasks)
    elif requests is not None:
        raise InputError(f"requests goes with --tasks; got requests={requests} without tasks")
    return TaskSettings(requests=requests, dtype=dtype)


def _with_reused(cells: "list[Cell]", root: Path, folders: Sequence[Path]) -> "list[Cell]":
    if not folders:
        return cells
    from l2r.files.folder import find_runs
    from l2r_lab.studies import with_finished_runs

    return with_finished_runs(cells, root, [run for path in folders for run in find_runs(path)])


def _plan_table(cells: "Sequence[Cell]", root: Path) -> Table:
    from l2r_lab.studies import is_finished

    rows = []
    for cell in cells:
        run = cell.run(root)
        started = "unfinished" if run.is_run() else "new"
        state = "finished" if is_finished(run, cell.recipe) else started
        state += f" in {cell.folder}" if cell.folder else ""
        last = (run.read_metrics("train") or [{"step": 0}])[-1]["step"]
        rows.append((cell.name, state, last))
    return Table(f"Cells in {root}", ("cell", "state", "last step"), tuple(rows))
