"""``l2r evidence``: run a registered plan over several seeds, and say what it shows."""

import os
from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.experiment import say
from l2r.cli.options import AsJson, Open


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
        Path, typer.Option(help="Folder of the results, one file per study.")
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
    from l2r.report.evidence import write_study
    from l2r.report.evidence_tables import main_table, terminal_table
    from l2r.studies.judging import Places, results_of, study_of
    from l2r.studies.schedule import Budget, StudyStoppedError, run_plan
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
    if judge_only and not found:
        raise ValueError(
            f"--judge-only needs results of {registered.name}; got none in {places.results} "
            "(--results names the folder of all studies)"
        )
    if not judge_only:
        try:
            found = run_plan(registered, plan, places, Budget(most, hours, processes), say)
        except StudyStoppedError as end:
            resumes = "stopped and saved; the same command resumes"
            say("runs failed; the same command tries them again" if end.signal is None else resumes)
            raise typer.Exit(1 if end.signal is None else 128 + end.signal) from None
    study = study_of(registered, found)
    print_table(main_table(study) if as_json else terminal_table(study), as_json=as_json)
    page, text = write_study(study, out / registered.name, results / registered.name)
    say(registered.state)
    print_pages([page, text], show=open_, err=True)
