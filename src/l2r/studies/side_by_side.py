"""Train cells in several processes at a time, shown and reported as one after another.

At the size of the demo two runs of one thread each take less time than both after one another with
two. The processes stay for all cells, since importing takes seconds. They are in a session of their
own: Ctrl-C reaches this process alone, which asks them to save.
"""

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import torch
from rich.progress import Progress, TaskID

from l2r.machine import available_memory
from l2r.runs.printable import printable
from l2r.training import StopRequest, progress_bar, stop_on_signals

_RUN_BYTES = 2**31  # of memory for each process; a run of the demo takes 0.9 GiB
Ended = tuple[bool, str | None, int | None]  # trained, error, signal
Train = Callable[..., Ended]  # of a job's values, and then ``display`` and ``report``


@dataclass(frozen=True)
class Job:
    """One run: what ``train`` is called with, its line on the screen, and its threads."""

    values: tuple[Any, ...]
    label: str
    threads: int = 1


def shares(jobs: int, processes: int) -> list[int]:
    """Threads of every job, where ``processes`` at a time have those of torch.

    The last ones have more where they would leave processes without work. A function of the
    numbers alone: in another number of threads sums have another order.
    """
    threads, last = torch.get_num_threads(), jobs % processes
    each = max(1, threads // processes)
    return [each] * (jobs - last) + [max(1, threads // max(1, last))] * last


def suitable_processes(jobs: int) -> int:
    """Processes that use this machine best: one per thread of torch's, but one on a GPU.

    Fewer where there is not enough memory, or not as many jobs. One on Windows, where a process
    cannot be asked to save.
    """
    if torch.cuda.is_available() or sys.platform == "win32":
        return 1
    room = available_memory() // _RUN_BYTES
    return max(1, min(jobs, torch.get_num_threads(), room))


def train_side_by_side(
    train: Train,
    jobs: Sequence[Job],
    processes: int,
    *,
    report: Callable[[str], None],
    show_progress: bool,
) -> Iterator[tuple[int, Ended]]:
    """How every job ended, by its position, in the order in which they end.

    The first begins alone: it prepares data and kernels that the others find. After a signal
    no further job begins, those that run save, and each of them has that signal. What ``train``
    raises is raised here when the others have saved.
    """
    group = _Group(train, jobs, min(processes, len(jobs)), report)
    bars = progress_bar(show=show_progress, transient=True)  # those that end are printed for good
    with bars as progress, stop_on_signals() as stop:
        try:
            yield from group.run(progress, stop)
        finally:
            group.kill()
    yield from group.stopped(stop)


class _Group:
    """The processes and what they are doing."""

    def __init__(
        self, train: Train, jobs: Sequence[Job], processes: int, report: Callable[[str], None]
    ) -> None:
        self.train, self.jobs, self.report = train, jobs, report
        self.todo = list(range(len(jobs)))
        self.threads = max(torch.get_num_threads(), processes)  # of all together
        self.workers = [self._start() for _ in range(processes)]
        self.prepared = self.asked = False
        self.raised: BaseException | None = None
        self.last: list[tuple[int, Ended]] = []

    def run(self, progress: Progress, stop: StopRequest) -> Iterator[tuple[int, Ended]]:
        while True:
            stopping = bool(stop) or self.raised is not None
            if stopping and not self.asked:
                self.asked = True
                for worker in self._busy():
                    worker.process.terminate()  # SIGTERM, with which a run saves
            if not stopping:
                self._assign()
            if not self._busy():
                break
            for worker in self._ready():
                ended = self._next(worker, progress)
                if ended is not None and (self.asked or stop):
                    self.last.append(ended)
                elif ended is not None:
                    yield ended

    def stopped(self, stop: StopRequest) -> Iterator[tuple[int, Ended]]:
        """Iterate over the ends of runs that were asked to save; raise one's error."""
        if self.raised is not None:
            raise self.raised
        number = None if stop.signal is None else int(stop.signal)
        if number is not None and self.todo and not self.last:  # it came between two runs
            self.last.append((self.todo[0], (False, None, None)))
        yield from ((job, (trained, error, number)) for job, (trained, error, _) in self.last)

    def kill(self) -> None:
        """End all processes; those at rest have nothing to lose."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()

    def _start(self) -> "_Worker":
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_work, args=(theirs, self.train))
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _busy(self) -> "list[_Worker]":
        return [worker for worker in self.workers if worker.job is not None]

    def _assign(self) -> None:
        for place, worker in enumerate(self.workers):
            if worker.job is not None or not self.todo:
                continue
            busy, job = self._busy(), self.jobs[self.todo[0]]
            taken = sum(self.jobs[other.job].threads for other in busy if other.job is not None)
            if busy and (not self.prepared or taken + job.threads > self.threads):
                return
            if not worker.process.is_alive():  # it was killed while it had nothing to do
                self._replace(worker)
            chosen = self.workers[place]
            chosen.job = self.todo.pop(0)
            with suppress(OSError):  # it ends now, as ``_next`` reads
                chosen.pipe.send((job.values, job.threads))

    def _replace(self, worker: "_Worker") -> None:
        """Start a worker in the place of one whose process has ended."""
        worker.pipe.close()
        self.workers[self.workers.index(worker)] = self._start()

    def _ready(self) -> "list[_Worker]":
        """Wait at most 0.2 s, to notice signals, for workers that have sent something."""
        pipes = {worker.pipe: worker for worker in self._busy()}
        return [pipes[pipe] for pipe in wait(list(pipes), timeout=0.2)]  # type: ignore[index]

    def _next(self, worker: "_Worker", progress: Progress) -> tuple[int, Ended] | None:
        """Show what a worker sends; how its job ended, if it did."""
        job = worker.job
        assert job is not None
        try:
            kind, *values = worker.pipe.recv()
        except (EOFError, OSError):
            kind, values = "died", []
        if kind == "report":
            self.report(*values)
        elif kind == "say":
            progress.console.print(printable(values[0]), highlight=False, markup=False)
        elif kind == "bar":
            worker.bar = progress.add_task(self.jobs[job].label, total=values[0], numbers="")
        elif kind == "advance" and worker.bar is not None:
            progress.update(worker.bar, completed=values[0], numbers=values[1])
            self.prepared = True
        else:
            self.prepared, worker.job = True, None
            self._leave(worker, progress)
            if kind == "ended":
                return job, values[0]
            if kind == "raised":
                self.raised = self.raised or values[0]
                return None
            worker.process.join()
            code = worker.process.exitcode
            self._replace(worker)
            error = None if self.asked else f"its process ended with code {code}"
            return job, (True, error, None)
        return None

    @staticmethod
    def _leave(worker: "_Worker", progress: Progress) -> None:
        """Print a run's bar for good, above those that go on."""
        if worker.bar is not None:
            (task,) = (task for task in progress.tasks if task.id == worker.bar)
            table = progress.make_tasks_table([task])
            progress.remove_task(worker.bar)
            progress.console.print(table)
        worker.bar = None


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    job: int | None = None
    bar: TaskID | None = None


_CONTEXT = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang


def _work(pipe: Connection, train: Train) -> None:
    """One process: train what comes, until nobody sends any more."""
    if hasattr(os, "setsid"):
        os.setsid()
    display = _Elsewhere(pipe)
    with suppress(EOFError, OSError):  # the process that asked is gone
        while True:
            values, threads = pipe.recv()
            torch.set_num_threads(threads)
            try:
                ended = train(*values, display=display, report=display.report)
            except Exception as error:
                error.add_note(traceback.format_exc())  # which no pipe carries
                pipe.send(("raised", _sendable(error)))
            else:
                pipe.send(("ended", ended))


def _sendable(error: Exception) -> Exception:
    """The error, or its words and notes in one that goes through a pipe."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # of any kind: of its class's own arguments, of what it holds
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in error.__notes__:
            plain.add_note(note)
        return plain
    return error


class _Elsewhere:
    """Bars and lines of a run, sent to the process that shows them; see ``monitor.Display``."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.console: Any = SimpleNamespace(print=self._say)

    def add_task(self, description: str, *, total: int, numbers: str) -> None:
        del description, numbers  # the label is known there
        self._pipe.send(("bar", total))

    def update(self, task_id: Any, *, completed: int, numbers: str) -> None:
        del task_id
        self._pipe.send(("advance", completed, numbers))

    def report(self, line: str) -> None:
        self._pipe.send(("report", line))

    def _say(self, line: str, **options: Any) -> None:
        del options
        self._pipe.send(("say", line))
