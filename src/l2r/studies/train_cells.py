"""Train cells: leave what is finished, resume the rest, say how each ended."""

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from l2r.errors import InputError, is_out_of_memory
from l2r.runs.atomic import refuse_link
from l2r.runs.folder import RunFolder
from l2r.studies.cells import Cell
from l2r.studies.processes import run_processes
from l2r.studies.side_by_side import Ended, Job, shares, train_side_by_side
from l2r.training import Ranks, claim_run, has_recipe, train
from l2r.training.recipes import AnyRecipe


@dataclass(frozen=True)
class Outcome:
    """End of a cell: ``error`` is one line, ``signal`` the signal by which it was stopped."""

    cell: Cell
    run: RunFolder
    trained: bool = False
    error: str | None = None
    signal: int | None = None


def run_cells(
    cells: Sequence[Cell],
    root: Path,
    *,
    launch: str | None = None,
    processes: int = 1,
    report: Callable[[str], None] = lambda line: None,
    show_progress: bool = True,
) -> Iterator[Outcome]:
    """Train the cells and say how each ended; begin no other after a signal.

    Finished cells are left as they are, unfinished ones resume from their newest checkpoint. A
    cell that fails does not stop the others. ``launch`` starts each cell as a process of its
    own, e.g. ``"torchrun --nproc-per-node 8"``; otherwise cells are trained in this process, one
    after another, or with ``processes`` above 1 in as many at a time. Raises ValueError for a
    ``launch`` that is no command of this machine.
    """
    launcher = None if launch is None else _command(launch)
    todo: list[tuple[Cell, RunFolder, str, int]] = []
    threads = shares(len(cells), processes)
    for number, cell in enumerate(cells, start=1):
        run = cell.run(root)
        label = f"[{number}/{len(cells)}] {cell.name}"
        ended: Ended | None = (False, None, None)
        try:
            refuse_link(run.path)
            if not is_finished(run, cell.recipe):
                ended = None
                if launcher is not None:
                    report(label)
                    ended = _train_elsewhere(cell, run, launcher)
                elif processes > 1:
                    todo.append((cell, run, label, threads[number - 1]))
                    continue
        except InputError as error:
            ended = (False, _in_one_line(error), None)
        if ended is None:
            ended = _train(cell.recipe, run.path, label, report=report, show_progress=show_progress)
        outcome = Outcome(cell, run, *ended)
        yield outcome
        if outcome.signal is not None:
            return
    jobs = [Job((cell.recipe, run.path, label), label, share) for cell, run, label, share in todo]
    if jobs:
        options: Any = {"report": report, "show_progress": show_progress}
        for position, ended in train_side_by_side(_train, jobs, processes, **options):
            cell, run, _, _ = todo[position]
            yield Outcome(cell, run, *ended)


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _train(recipe: AnyRecipe, folder: Path, label: str, **options: Any) -> Ended:
    """Train here; whether it was trained, the error in one line, and the signal that came."""
    try:
        result = train(recipe, folder, label=label, **options)
    except Exception as error:
        if not (isinstance(error, InputError) or is_out_of_memory(error)):
            raise  # a bug ends all of them
        return False, _in_one_line(error), None
    signal = result.signal if result.finished else int(result.signal or 0)
    return True, None, signal


def is_finished(run: RunFolder, recipe: AnyRecipe) -> bool:
    """Whether the folder holds the final weights of just this recipe."""
    return has_recipe(run, recipe) and run.is_finished()


def _command(launch: str) -> list[str]:
    try:
        words = shlex.split(launch)
    except ValueError as error:
        raise InputError(f"launch must be a command; got {launch!r:.80}: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise InputError(f"launch must begin with a program that is there; got {launch!r:.80}")
    return words


def _train_elsewhere(cell: Cell, run: RunFolder, launcher: list[str]) -> Ended:
    """One process per cell; a signal to us is handed on, so that the cell saves before it ends."""
    run.create()
    claim_run(run, cell.recipe, Ranks(0, 1, torch.device("cpu")))
    command = [*launcher, "-m", "l2r", "train", str(run.recipe), "--out", str(run.path)]
    codes, signal = run_processes(command)
    if signal is not None:
        return True, None, signal
    if any(codes):
        return False, f"its process ended with code {codes[0]}", None
    return True, None, None
