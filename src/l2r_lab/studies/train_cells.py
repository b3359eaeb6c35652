"""Train cells: leave what is finished, resume the rest, say how each ended.

One process trains them (``run_cells``), or several that share them and are shown as one
(``share_cells``): at the size of the demo two runs of one thread each take less time than both
after one another with two.
"""

import json
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TaskID

from l2r.errors import InputError, is_out_of_memory
from l2r.files.atomic import refuse_link
from l2r.files.folder import RunFolder
from l2r.files.wording import printable
from l2r_lab.studies.cells import Cell
from l2r_lab.studies.running import LOCKS, Ended, Job, read_mark, run_processes, shares, walk
from l2r_lab.training import (
    Ranks,
    claim_run,
    has_recipe,
    progress_bar,
    resumed,
    train,
    with_pixels,
)
from l2r_lab.training.recipes import AnyRecipe

_REFUSED, _BUG = 2, 70  # exit codes of our commands by which no later job would end better
_TAIL = 2**13  # bytes at the end of metrics.jsonl that hold a training record
_IN_USE = "output folder {} is in use by another run"


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
    share: str | None = None,
    processes: int = 1,
    report: Callable[[str], None] = lambda line: None,
    show_progress: bool = True,
) -> Iterator[Outcome]:
    """Train the cells and say how each ended; begin no other after a signal.

    Finished cells are left as they are, unfinished ones resume from their newest checkpoint. A
    cell that fails does not stop the others. ``launch`` starts each cell as a process of its
    own, e.g. ``"torchrun --nproc-per-node 8"``; otherwise cells are trained in this process, one
    after another. With ``share`` this process is one of ``processes`` of that command (see
    ``walk``) and has its share of the threads. Raises ValueError for a ``launch`` that is no
    command of this machine.
    """
    launcher = None if launch is None else _command(launch)
    threads = [None] * len(cells) if share is None else shares(len(cells), processes)
    options: Any = {"launcher": launcher, "report": report, "show_progress": show_progress}
    jobs, by_name = [], dict[str, Cell]()
    for number, cell in enumerate(cells, start=1):
        label = f"[{number}/{len(cells)}] {cell.name}"
        work = partial(train_cell, cell, root, label, **options)
        jobs.append(Job(cell.name, work, threads[number - 1]))
        by_name[cell.name] = cell
    stopped = False
    for job, ended in walk(jobs, root / LOCKS, share=share):
        cell = by_name.pop(job.name)
        stopped = ended.signal is not None
        yield Outcome(cell, cell.run(root), *ended)
    for cell in by_name.values() if share is None and not stopped else ():
        run = cell.run(root)
        yield Outcome(cell, run, error=_IN_USE.format(run.path))


def train_cell(
    cell: Cell,
    root: Path,
    label: str,
    *,
    launcher: Sequence[str] | None = None,
    report: Callable[[str], None] = lambda line: None,
    show_progress: bool = True,
) -> Ended:
    """Train one cell, unless it is finished: in this process, or in one that ``launcher`` starts.

    What is not bad input or too little memory is raised: a bug ends all runs.
    """
    run = cell.run(root)
    try:
        refuse_link(run.path)
        if is_finished(run, cell.recipe):
            return Ended()
        if launcher is not None:
            report(label)
            return _train_elsewhere(cell, run, launcher)
        options: Any = {"report": report, "show_progress": show_progress}
        result = train(cell.recipe, run.path, label=label, **options)
    except Exception as error:
        if not (isinstance(error, InputError) or is_out_of_memory(error)):
            raise
        return Ended(error=" ".join(str(error).split()) or type(error).__name__)
    return Ended(True, None, result.signal if result.finished else int(result.signal or 0))


def is_finished(run: RunFolder, recipe: AnyRecipe) -> bool:
    """Tell whether the folder holds the final weights of just this recipe."""
    return has_recipe(run, recipe) and run.is_finished()


def with_finished_runs(cells: Sequence[Cell], root: Path, runs: Sequence[RunFolder]) -> list[Cell]:
    """Give each cell the folder of the first of ``runs`` that is finished and just this run.

    Every field that training depends on must be the same, the seed too. A cell that is finished in
    ``root`` stays there. Raises ValueError for a recipe that cannot be read.
    """
    ended = [run for run in runs if run.is_finished()]
    found = []
    for cell in cells:
        own = is_finished(cell.run(root), cell.recipe)
        other = None if own else next((r for r in ended if has_recipe(r, cell.recipe)), None)
        found.append(cell if other is None else replace(cell, folder=other.path))
    return found


def _command(launch: str) -> list[str]:
    try:
        words = shlex.split(launch)
    except ValueError as error:
        raise InputError(f"launch must be a command; got {launch!r:.80}: {error}") from error
    # torchrun of a virtual environment that is not activated stands beside python
    places = [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    program = shutil.which(words[0], path=os.pathsep.join(places)) if words else None
    if program is None:
        raise InputError(f"launch must begin with a program that is there; got {launch!r:.80}")
    return [program, *words[1:]]


def _train_elsewhere(cell: Cell, run: RunFolder, launcher: Sequence[str]) -> Ended:
    """One process per cell; a signal to us is handed on, so that the cell saves before it ends."""
    run.create()
    # the process reads the folder's recipe, in which nothing must be left to images
    recipe = with_pixels(resumed(run, cell.recipe))
    claim_run(run, recipe, Ranks(0, 1, torch.device("cpu")))
    command = [*launcher, "-m", "l2r", "train", str(run.recipe), "--out", str(run.path)]
    codes, number = run_processes(command)
    if number is None and any(codes.values()):
        return Ended(error="its process ended with code {}".format(*codes.values()))
    return Ended(True, signal=number)


def share_cells(
    command: Sequence[str],
    cells: Sequence[Cell],
    root: Path,
    processes: int,
    *,
    report: Callable[[str], None] = lambda line: None,
    show_progress: bool = True,
) -> Iterator[Outcome]:
    """Run ``l2r COMMAND --worker-of NAME`` in several processes, and say how each cell ended.

    Each of them trains its share of the cells (``run_cells``); its lines, and a bar of every run
    that goes on, are shown here. The first begins alone: it prepares data and kernels that the
    others find. Raises SystemExit where one ended with an error that all would meet.
    """
    todo = [cell for cell in cells if not _is_done(cell, root)]
    share, codes = secrets.token_hex(8), dict[int, int]()
    number: int | None = None
    if todo:
        words = [sys.executable, "-m", "l2r", *command, "--worker-of", share]
        with progress_bar(show=show_progress, transient=True) as progress:
            codes, number = run_processes(
                [*words, "--processes", str(processes)],
                min(processes, len(todo)),
                say=partial(_print_above, progress),
                poll=_Bars(progress, cells, root, share).update,
                replacements=len(todo),
                fatal=(_REFUSED, _BUG),
            )
    if number is not None:
        yield Outcome(todo[0], todo[0].run(root), signal=number)
        return
    for code in codes.values():
        if code in (_REFUSED, _BUG):
            raise SystemExit(code)
    for cell in cells:
        run = cell.run(root)
        mark = read_mark(root / LOCKS, cell.name, share) if cell in todo else {"ended": Ended()}
        if mark is not None and "ended" in mark:
            yield Outcome(cell, run, *mark["ended"])
            continue
        died = None if mark is None else codes.get(int(str(mark["pid"])))
        error = _IN_USE.format(run.path) if mark is None else f"its process ended with code {died}"
        report(f"failed: {cell.name}: {error}")
        yield Outcome(cell, run, mark is not None, error)


def _is_done(cell: Cell, root: Path) -> bool:
    with suppress(InputError):  # what is wrong is said when the cell has its turn
        return is_finished(cell.run(root), cell.recipe)
    return False


def _print_above(progress: Progress, line: str) -> None:
    progress.console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


class _Bars:
    """Bars of the runs that go on, by the numbers in their folders."""

    def __init__(self, progress: Progress, cells: Sequence[Cell], root: Path, share: str) -> None:
        self.progress, self.cells, self.root, self.share = progress, cells, root, share
        self.shown: dict[str, TaskID] = {}

    def update(self) -> bool:
        """Move the bars; return whether a run trains or has ended."""
        ready = False
        for number, cell in enumerate(self.cells, start=1):
            mark = read_mark(self.root / LOCKS, cell.name, self.share)
            if mark is None:
                continue
            last = None if "ended" in mark else _last_numbers(cell.run(self.root))
            ready = ready or "ended" in mark or last is not None
            if last is not None:
                label = f"[{number}/{len(self.cells)}] {cell.name}"
                if cell.name not in self.shown:
                    total = cell.run(self.root).planned_steps()
                    self.shown[cell.name] = self.progress.add_task(label, total=total, numbers="")
                unit = "images" if "images" in last else "tokens"
                numbers = f"loss {last['ce']:.3f}  {last['per_second']:,.0f} {unit}/s"
                task = self.shown[cell.name]
                self.progress.update(task, completed=last["step"], numbers=numbers)
            elif cell.name in self.shown:  # its process has printed the last of it
                self.progress.remove_task(self.shown.pop(cell.name))
        return ready


def _last_numbers(run: RunFolder) -> dict[str, Any] | None:
    """Newest training record of a run, from the end of its file."""
    with suppress(OSError, ValueError):
        with run.metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().splitlines()
        records = (json.loads(line) for line in reversed(lines) if line.endswith(b"}"))
        return next((r for r in records if r.get("kind") == "train"), None)
    return None
