"""``l2r evidence``: run a registered plan over several seeds, and say what it shows."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from l2r.cli.experiment import say
from l2r.cli.options import AsJson, Open

if TYPE_CHECKING:
    from l2r.runs.study import CellResult
    from l2r.studies.judging import Places
    from l2r.studies.study_plan import Registered


def evidence(
    plan: Annotated[str, typer.Argument(help="Plan of the package, or a YAML path.")] = "paper",
    seeds: Annotated[
        int | None, typer.Option(help="At most so many seeds for now (default: the plan's).", min=1)
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="As many seeds as fit into this time.", min=0.001)
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(help="Runs at a time (default: one per core, one on a GPU).", min=1),
    ] = None,
    results: Annotated[
        Path, typer.Option(help="Folder of the results, one small file per run.")
    ] = Path("results/evidence"),
    out: Annotated[Path, typer.Option(help="Folder of the runs and the page.")] = Path(
        "runs/evidence"
    ),
    keep_runs: Annotated[
        bool, typer.Option("--keep-runs", help="Keep run folders that were measured.")
    ] = False,
    judge_only: Annotated[
        bool, typer.Option("--judge-only", help="Train nothing: judge the results there are.")
    ] = False,
    share: Annotated[int, typer.Option(hidden=True, help="Only run cells, at most so many.")] = 0,
    open_: Open = False,
    as_json: AsJson = False,
) -> None:
    """Run a registered plan over several seeds: every contrast ends better, worse, equivalent or
    undecided.

    The same command goes on where it stopped; from a second terminal it helps the first.

    Example: l2r evidence paper --hours 3
    """
    from l2r.cli.console import print_pages, print_table
    from l2r.report.evidence import main_table, terminal_table, write_study
    from l2r.studies.judging import Places, results_of, study_of
    from l2r.studies.study import run_share
    from l2r.studies.study_plan import read_plan

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("this command starts processes of its own; run it without torchrun")
    registered = read_plan(plan)
    most = min(seeds or registered.plan.seeds.most, registered.plan.seeds.most)
    places = Places(results / registered.name, out / registered.name, keep_runs)
    cells = registered.plan.cells(most)
    if share:
        os.nice(10)
        failed, signal = run_share(registered, cells, places, limit=share, report=say)
        raise typer.Exit(128 + signal if signal else int(failed > 0))
    found = results_of(registered, cells, places)  # of another recipe: said before hours of work
    if not judge_only:
        found = _run(registered, plan, most, hours, processes, places, (results, out))
    study = study_of(registered, found)
    print_table(main_table(study) if as_json else terminal_table(study), as_json=as_json)
    page, text = write_study(study, out / registered.name, results / registered.name)
    say(registered.state)
    print_pages([page, text], show=open_, err=True)


def _run(
    registered: "Registered",
    name: str,
    most: int,
    hours: float | None,
    processes: int | None,
    places: "Places",
    folders: tuple[Path, Path],
) -> "list[CellResult]":
    """Seed by seed until the stopping rule, the most seeds or the hours; all results then."""
    import time

    from l2r.studies.judging import is_decided, judge_plan, results_of, seeds_that_fit
    from l2r.studies.study import own_processes as machine

    plan, start = registered.plan, time.monotonic()
    at_once, threads = machine()
    if processes is not None:
        threads, at_once = max(1, at_once * threads // processes), processes

    def run(seeds: int, cells: int = 1_000_000) -> "list[CellResult]":
        todo = plan.cells(seeds)
        if any(not places.result(cell).is_file() for cell in todo):
            _share(name, seeds, cells, at_once, threads, places, folders)
        return results_of(registered, todo, places)

    arms = len(plan.all_arms())
    say(f"{registered.name}: {arms} arms, {at_once} at a time with {threads} threads each")
    if hours is not None:
        run(most, cells=1)  # a cell in every process tells how long one takes here
    found: list[CellResult] = []
    for seeds in range(min(plan.seeds.least, most), most + 1):
        if hours is not None:
            left = hours - (time.monotonic() - start) / 3600
            done = results_of(registered, plan.cells(most), places)
            fit = seeds_that_fit(plan, done, left, at_once, most)
            say(f"{hours:g} hours fit {fit} of at most {most} seeds here")
            if fit < seeds:
                return run(fit) if fit else done
        found = run(seeds)
        if seeds >= plan.seeds.least and is_decided(plan, judge_plan(plan, found)):
            say(f"{seeds} seeds: every primary interval is narrow enough")
            break
    return found


def _share(
    name: str,
    seeds: int,
    cells: int,
    processes: int,
    threads: int,
    places: "Places",
    folders: tuple[Path, Path],
) -> None:
    """Processes that run what is missing; exits as they did where one was stopped or failed."""
    from l2r.studies.study import run_processes

    command = [sys.executable, "-m", "l2r", "evidence", name, "--seeds", str(seeds)]
    command += ["--results", str(folders[0]), "--out", str(folders[1]), "--share", str(cells)]
    command += ["--keep-runs"] if places.keep_runs else []
    codes, signal = run_processes(command, processes, threads)
    if signal is not None:
        say("stopped and saved; the same command resumes")
        raise typer.Exit(128 + signal)
    if any(codes):
        say("runs failed; the same command tries them again")
        raise typer.Exit(1)
