"""Processes of ours: how they are started, waited for and stopped."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from l2r.training import stop_on_signals


def run_processes(
    command: Sequence[str], processes: int = 1, threads: int | None = None
) -> tuple[list[int], int | None]:
    """Start a command several times over and wait: exit codes, and the signal that we got.

    A signal is handed on, so that every run saves before it ends. ``threads``: of each process;
    None leaves them to the command.
    """
    # Python must not import from the folder that the processes are started in.
    variables = {**os.environ, "PYTHONSAFEPATH": "1"}
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    with stop_on_signals() as stop:
        # Not in our process group: Ctrl-C would reach them twice, and the second one kills.
        started = [
            subprocess.Popen(command, env=variables, stdout=sys.stderr, start_new_session=True)
            for _ in range(processes)
        ]
        forwarded = False
        while any(process.poll() is None for process in started):
            if stop.signal is not None and not forwarded:
                forwarded = True
                for process in started:
                    process.send_signal(stop.signal)
            time.sleep(0.2)
        codes = [process.returncode for process in started]
        return codes, None if stop.signal is None else int(stop.signal)


def own_processes() -> tuple[int, int]:
    """Processes and threads of each that use this machine best: one of one thread per core.

    At the size of the demo two processes of one thread do more work than one of two threads
    (docs/evidence-method.md). A GPU gets one process.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (1, cores or 1) if torch.cuda.is_available() else (cores or 1, 1)
