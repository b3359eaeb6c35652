"""Train cells one after another: leave what is finished, resume the rest, say how each ended."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from l2r.runs.atomic import refuse_link
from l2r.runs.folder import RunFolder
from l2r.studies.cells import Cell
from l2r.studies.processes import run_processes
from l2r.training import Ranks, claim_run, has_recipe, train
from l2r.training.recipes import AnyRecipe


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: ``error`` is one line, ``signal`` says that somebody stopped it."""

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
    report: Callable[[str], None] = lambda line: None,
    show_progress: bool = True,
) -> Iterator[Outcome]:
    """Train the cells one after another and say how each ended; stop after a signal.

    Finished cells are left as they are, unfinished ones resume from their newest checkpoint. A
    cell that fails does not stop the others. ``launch`` starts each cell as a process of its
    own, e.g. ``"torchrun --nproc-per-node 8"``; otherwise cells are trained in this process.
    """
    for number, cell in enumerate(cells, start=1):
        run = cell.run(root)
        label = f"[{number}/{len(cells)}] {cell.name}"
        try:
            refuse_link(run.path)
            if is_finished(run, cell.recipe):
                outcome = Outcome(cell, run)
            elif launch is None:
                result = train(
                    cell.recipe, run.path, label=label, report=report, show_progress=show_progress
                )
                signal = result.signal if result.finished else int(result.signal or 0)
                outcome = Outcome(cell, run, trained=True, signal=signal)
            else:
                report(label)
                outcome = _train_elsewhere(cell, run, shlex.split(launch))
        except (ValueError, OSError, RuntimeError, MemoryError) as error:  # the third: GPU memory
            text = " ".join(str(error).split()) or type(error).__name__
            outcome = Outcome(cell, run, error=text)
        yield outcome
        if outcome.signal is not None:
            return


def is_finished(run: RunFolder, recipe: AnyRecipe) -> bool:
    """Whether the folder holds the final weights of just this recipe."""
    return has_recipe(run, recipe) and run.is_finished()


def _train_elsewhere(cell: Cell, run: RunFolder, launcher: list[str]) -> Outcome:
    """One process per cell; a signal to us is handed on, so that the cell saves before it ends."""
    run.create()
    claim_run(run, cell.recipe, Ranks(0, 1, torch.device("cpu")))
    command = [*launcher, "-m", "l2r", "train", str(run.recipe), "--out", str(run.path)]
    codes, signal = run_processes(command)
    if signal is not None:
        return Outcome(cell, run, trained=True, signal=signal)
    if any(codes):
        raise RuntimeError(f"its process ended with code {codes[0]}")
    return Outcome(cell, run, trained=True)
