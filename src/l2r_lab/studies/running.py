"""Walk over a list of jobs, in one process or in several that share the list by lock files.

Every process walks the same list and does what nobody has done or holds. A lock dies with its
process, so a killed process loses its own job alone. compare, sweep and evidence run by this walk.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from l2r.files.atomic import lock, make_folder, try_lock
from l2r.machine import available_memory
from l2r_lab.training import stop_on_signals

LOCKS = ".claims"  # folder of the lock files, among the runs
_RUN_BYTES = 2**31  # of memory for each process; a run of the demo takes 0.9 GiB


class Ended(NamedTuple):
    """End of a job: ``error`` is one line, ``signal`` the signal by which it was stopped."""

    trained: bool = False
    error: str | None = None
    signal: int | None = None


@dataclass(frozen=True)
class Job:
    """One entry of the list: the name of its lock, and what to do for it under the lock.

    work: returns None where there was nothing to do. threads: of torch's; None leaves them.
    """

    name: str
    work: Callable[[], Ended | None]
    threads: int | None = None


def walk(
    jobs: Sequence[Job], locks: Path, *, limit: int | None = None, share: str | None = None
) -> Iterator[tuple[Job, Ended]]:
    """Do the jobs that nobody has done or holds, in order, and yield how each ended.

    Stop after a signal, and after ``limit`` jobs. With ``limit`` or ``share`` another process
    started this one: stop too when that process is gone. ``share`` names the command of several
    processes: each job is begun once by all of them, and its end is written into its lock file.
    """
    make_folder(locks.parent, locks.name)
    parent, begun = os.getppid(), 0
    for position, job in enumerate(jobs):
        with try_lock(locks / job.name) as mine:
            orphaned = (limit, share) != (None, None) and os.getppid() != parent
            if orphaned or begun == limit:
                return
            if not mine or (share is not None and read_mark(locks, job.name, share) is not None):
                continue
            if share is not None:
                _write_mark(locks, job.name, share, {"pid": os.getpid()})
            if job.threads is not None:
                _wait_for_threads(jobs[:position], job.threads, locks)
                torch.set_num_threads(job.threads)
            ended = job.work()
            if share is not None:
                _write_mark(locks, job.name, share, {"ended": ended})
            if ended is None:
                continue
            begun += 1
            yield job, ended
        if ended.signal is not None:
            return


def _wait_for_threads(before: Sequence[Job], threads: int, locks: Path) -> None:
    """Wait until the jobs before this one have ended that have fewer threads than it."""
    for job in before:
        if job.threads is not None and job.threads < threads:
            with lock(locks / job.name):
                pass


def _write_mark(locks: Path, name: str, share: str, values: dict[str, Any]) -> None:
    (locks / name).write_text(json.dumps({"share": share, **values}), encoding="utf-8")


def read_mark(locks: Path, name: str, share: str) -> dict[str, Any] | None:
    """Note of a process of this share in a lock file; None where none of them began the job."""
    with suppress(OSError, ValueError, RecursionError):
        values = json.loads((locks / name).read_text(encoding="utf-8"))
        if isinstance(values, dict) and values.get("share") == share:
            return values
    return None


def shares(jobs: int, processes: int) -> list[int]:
    """Threads of every job, where ``processes`` at a time have those of torch.

    The last ones have more where they would leave processes without work. A function of the
    numbers alone: in another number of threads sums have another order.
    """
    threads, last = torch.get_num_threads(), jobs % processes
    each = max(1, threads // processes)
    return [each] * (jobs - last) + [max(1, threads // max(1, last))] * last


def suitable_processes(jobs: int) -> int:
    """Return processes that use this machine best: one per thread of torch's, but one on a GPU.

    Fewer where there is not enough memory, or not as many jobs. One on Windows, where a process
    cannot be asked to save.
    """
    if torch.cuda.is_available() or sys.platform == "win32":
        return 1
    room = available_memory() // _RUN_BYTES
    return max(1, min(jobs, torch.get_num_threads(), room))


def own_processes() -> tuple[int, int]:
    """Return processes and threads of each that use this machine best: one of one thread per core.

    At the size of the demo two processes of one thread do more work than one of two threads.
    A GPU gets one process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (1, cores or 1) if torch.cuda.is_available() else (cores or 1, 1)


def run_processes(
    command: Sequence[str],
    processes: int = 1,
    threads: int | None = None,
    *,
    say: Callable[[str], None] | None = None,
    poll: Callable[[], bool] = lambda: True,
    replacements: int = 0,
    fatal: Sequence[int] = (),
) -> tuple[dict[int, int], int | None]:
    """Start a command several times over and wait: exit codes by process, and the signal we got.

    A signal is handed on, so that every run saves before it ends. threads: of each process; None
    leaves them to the command. say: gets every line that a process prints; without it they print
    on standard error. poll: called five times a second; all but the first begin once it is true.
    replacements: processes that may be started for some that did not end with 0. fatal: codes
    after which the others are asked to save.
    """
    # Python must not import from the folder that the processes are started in.
    variables = {**os.environ, "PYTHONSAFEPATH": "1"}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    # Not in our process group: Ctrl-C would reach them twice, and the second one kills.
    options: dict[str, Any] = {"env": variables, "start_new_session": True, "stdout": sys.stderr}
    if say is not None:
        variables.setdefault("COLUMNS", str(shutil.get_terminal_size().columns))
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        options |= {"encoding": "utf-8", "errors": "replace"}
    started: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []

    def start() -> None:
        process = subprocess.Popen(command, **options)
        started.append(process)
        if say is not None:
            readers.append(threading.Thread(target=_forward, args=(process, say), daemon=True))
            readers[-1].start()

    asked = False
    try:
        with stop_on_signals() as stop:
            start()
            while True:
                codes = [process.poll() for process in started]
                if not asked and (stop or any(code in fatal for code in codes)):
                    asked = True
                    for process in started:
                        process.send_signal(stop.signal or signal.SIGTERM)
                died = sum(code not in (None, 0) for code in codes)
                if not asked and poll() and len(started) < processes + min(died, replacements):
                    start()
                elif None not in codes:
                    break
                else:
                    time.sleep(0.2)
        for reader in readers:
            reader.join()
    finally:
        for process in started:
            if process.poll() is None:  # after a second Ctrl-C
                process.kill()
    ended = {process.pid: process.returncode for process in started}
    return ended, None if stop.signal is None else int(stop.signal)


def _forward(process: "subprocess.Popen[str]", say: Callable[[str], None]) -> None:
    with process.stdout or nullcontext() as lines:
        for line in lines or ():
            say(line.rstrip("\n"))
