"""What compare and sweep do alike: run their cells, diagnose, and end in one way."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from l2r.cli.output import echo
from l2r.errors import InputError, environment_number

if TYPE_CHECKING:
    from l2r.studies import Cell, Outcome

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


def check_inputs(recipe: str, changes: Sequence[str]) -> None:
    """Raise ValueError for a recipe whose data are not there: before torch, and before a run.

    A field of its router that is wrong is found later, with torch.
    """
    from l2r.training.recipes import BUILT_IN_IMAGES, load_sections

    data = load_sections(recipe, changes).data.model_dump()
    builtin = (None, "embedded", *BUILT_IN_IMAGES)
    for name in ("corpus", "tokens", "validation_tokens", "tokenizer", "images"):
        value = data.get(name)
        for path in value if isinstance(value, list) else [value]:
            if path not in builtin and not Path(path).expanduser().exists():
                raise InputError(f"data.{name} must be a path that exists; got {path}")


def run_all(
    cells: "Sequence[Cell]", root: Path, *, launch: str | None, processes: int | None = None
) -> "tuple[list[Outcome], dict[str, str]]":
    """Train the cells; those that are finished, and the error of each that failed, by its name.

    A signal ends the command with exit code 128 + signal. Raises ValueError under torchrun.
    """
    from l2r.studies import run_cells, suitable_processes

    if environment_number("WORLD_SIZE", 1) > 1:
        raise InputError(
            "this command is one process; start its runs with "
            '--launch "torchrun --nproc-per-node N"'
        )

    if processes is None:
        processes = suitable_processes(len(cells))
    finished, failed = [], {}
    options: Any = {"launch": launch, "processes": processes, "report": say}
    for outcome in run_cells(cells, root, **options):
        if outcome.signal is not None:
            say("stopped; the same command goes on from what was saved")
            raise typer.Exit(128 + outcome.signal)
        if outcome.error is not None:
            say(f"failed: {outcome.cell.name}: {outcome.error}")
            failed[outcome.cell.name] = outcome.error
        else:
            finished.append(outcome)
    return sorted(finished, key=lambda outcome: cells.index(outcome.cell)), failed


def diagnose_all(outcomes: "Iterable[Outcome]") -> None:
    """A diagnosis of every run; one that cannot be made is named and left out."""
    from l2r.cli.console import progress_bars
    from l2r.studies import diagnose_run

    todo = list(outcomes)
    with progress_bars() as bars:
        for done, outcome in enumerate(todo):
            bars("diagnoses", done, len(todo), outcome.run.name)
            try:
                diagnose_run(outcome.run, outcome.cell.recipe)
            except InputError as error:
                say(f"no diagnosis of {outcome.run.name}: {' '.join(str(error).split())}")
        bars("diagnoses", len(todo), len(todo), "")


def end(failed: dict[str, str], cells: "Sequence[Cell]") -> None:
    """Exit code 1 where a run failed."""
    if failed:
        say(f"{len(failed)} of {len(cells)} runs failed; the same command tries them again")
        raise typer.Exit(1)


def say(line: str) -> None:
    """Print one line on standard error, apart from the results."""
    echo(line, err=True)


def say_left_out(checkpoint: str, source: Path, new: Path) -> None:
    """Name what a checkpoint's folder holds and the folder that was made from it lacks."""
    from l2r.hf.checkpoints import files_left_out
    from l2r.hf.models import files_of_weights

    names = files_left_out(source, new, files_of_weights(source))
    if names:
        say(f"not copied from {checkpoint}: {', '.join(names)}")
