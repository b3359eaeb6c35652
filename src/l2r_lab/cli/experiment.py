"""Steps that compare and sweep share: run their cells, diagnose, and end in one way."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from l2r.cli.output import say
from l2r.errors import InputError, environment_number

if TYPE_CHECKING:
    from l2r_lab.studies import Cell, Outcome
    from l2r_lab.training.evaluation import TaskSettings

Launch = Annotated[
    str | None,
    typer.Option(help='Start each run by this, e.g. "torchrun --nproc-per-node 8".'),
]
Processes = Annotated[
    int | None,
    typer.Option(
        help="Processes at a time: runs, each with its share of the threads (default: one per "
        "thread).",
        min=1,
    ),
]
WorkerOf = Annotated[
    str | None, typer.Option(hidden=True, help="Be one of the processes of that command.")
]


def check_inputs(recipe: str, changes: Sequence[str]) -> None:
    """Raise ValueError for a recipe whose data are not there: before torch, and before a run.

    A field of its router that is wrong is found later, with torch.
    """
    from l2r.images import BUILT_IN_IMAGES
    from l2r_lab.training.recipes import load_sections

    data = load_sections(recipe, changes).data.model_dump()
    builtin = (None, "embedded", *BUILT_IN_IMAGES)
    for name in ("corpus", "tokens", "validation_tokens", "tokenizer", "images"):
        value = data.get(name)
        for path in value if isinstance(value, list) else [value]:
            if path not in builtin and not Path(path).expanduser().exists():
                raise InputError(f"data.{name} must be a path that exists; got {path}")


def run_all(
    cells: "Sequence[Cell]",
    root: Path,
    command: Sequence[str],
    *,
    launch: str | None,
    processes: int | None,
    share: str | None,
    ended: "Callable[[Outcome], None]" = lambda outcome: None,
) -> "tuple[list[Outcome], dict[str, str]]":
    """Train the cells; those that are finished, and the error of each that failed, by its name.

    ``command``: words of the l2r command by which other processes come to the same cells; one of
    them has its ``share`` and ends here. ``ended`` gets each finished run at once, while others
    are trained. A signal ends the command with exit code 128 + signal.
    Raises ValueError under torchrun.
    """
    from l2r_lab.studies import run_cells, share_cells, suitable_processes

    if environment_number("WORLD_SIZE", 1) > 1:
        raise InputError(
            "this command is one process; start its runs with "
            '--launch "torchrun --nproc-per-node N"'
        )
    processes = processes or suitable_processes(len(cells))
    together = share is None and launch is None and processes > 1
    options: Any = {"launch": launch, "share": share, "processes": processes, "report": say}
    if together:
        outcomes = share_cells(command, cells, root, processes, report=say)
    else:
        outcomes = run_cells(cells, root, **options)
    finished, failed = [], {}
    for outcome in outcomes:
        if outcome.signal is not None:
            if share is None:
                say("stopped; the same command goes on from what was saved")
            raise typer.Exit(128 + outcome.signal)
        if outcome.error is None:
            finished.append(outcome)
            if share is None:
                ended(outcome)
            continue
        failed[outcome.cell.name] = outcome.error
        if not together:  # each process has said what failed in it
            say(f"failed: {outcome.cell.name}: {outcome.error}")
    if share is not None:
        raise typer.Exit
    return finished, failed


def diagnose_all(outcomes: "Iterable[Outcome]") -> None:
    """Diagnose every run; a diagnosis that cannot be made is named and left out."""
    from l2r.cli.console import progress_bars
    from l2r_lab.studies import diagnose_run

    todo = list(outcomes)
    with progress_bars() as bars:
        for done, outcome in enumerate(todo):
            bars("diagnoses", done, len(todo), outcome.run.name)
            try:
                diagnose_run(outcome.run, outcome.cell.recipe)
            except InputError as error:
                say(f"no diagnosis of {outcome.run.name}: {' '.join(str(error).split())}")
        bars("diagnoses", len(todo), len(todo), "")


def evaluate_all(
    outcomes: "Iterable[Outcome]", tasks: str, settings: "TaskSettings", batch_size: int
) -> None:
    """Accuracies on tasks of every run, in its evaluation.json; what has them is not opened."""
    from l2r.cli.console import progress_bars
    from l2r.hf.checkpoints import Placement
    from l2r_lab.training.evaluation import evaluate_language, select_tasks

    names = {task.name for task in select_tasks(tasks)}
    options: Any = {"tasks": tasks, "settings": settings, "batch_size": batch_size}
    options["placement"] = Placement(settings.dtype, "auto", None, say)
    for outcome in outcomes:
        run = outcome.run
        record = run.read_json(run.evaluation)
        if record.get("settings") == asdict(settings) and names <= record.get("tasks", {}).keys():
            continue
        with progress_bars() as bars:
            evaluate_language(run.path, run.path, on_progress=bars, **options)
        say(f"wrote {run.evaluation}")


def end(failed: dict[str, str], cells: "Sequence[Cell]") -> None:
    """Exit code 1 where a run failed."""
    if failed:
        say(f"{len(failed)} of {len(cells)} runs failed; the same command tries them again")
        raise typer.Exit(1)
