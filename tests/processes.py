"""Processes that start at once: forks of a server that has imported everything.

A Python that imports torch and transformers anew takes seconds, most of what a test of processes
cost. Signals, exit codes and ranks are those of any process; the tests that must see a real start
(``python -m l2r``, torchrun) still make one.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, current_process, get_context, set_forkserver_preload
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

set_forkserver_preload(  # what cannot be imported here is left out
    [
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "transformers.generation",
        "transformers.models.olmoe.modeling_olmoe",
        "transformers.models.vit.modeling_vit",
        "l2r.hf.checkpoints.pretrained",
        "l2r.cli",
        "l2r.analysis.diagnostics.model_diagnosis",
        "l2r_lab.training.evaluation.downstream",
        "l2r.engines.trainer",
        "l2r.hf.models",
        "l2r.report.diagnosis",
        "l2r.hf.swap",
        "l2r_lab.training.language",
        "l2r_lab.training.loop",
        "l2r_lab.training.vision",
    ]
)
_CONTEXT = get_context("forkserver")
if current_process().name == "MainProcess":  # before a loader of images preloads itself alone
    ensure_running()


class Running:
    """A function in a process of its own; its output goes to two files."""

    def __init__(
        self, folder: Path, run: Callable[..., None], *arguments: Any, **environment: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = folder / "out.txt", folder / "err.txt"
        for path in self._files:  # one that is stopped early has written neither
            path.write_text("")
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.process = _CONTEXT.Process(
            target=_run, args=(self._files, surroundings, str(Path.cwd()), run, arguments)
        )
        self.process.start()

    def send_signal(self, number: int) -> None:
        """The signal, sent to this process alone."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, timeout: float = 480) -> int:
        """Its exit code; minus the number of the signal that ended it."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.stop()
            raise TimeoutError(f"no end after {timeout} s:\n{self.err[-6000:]}")
        return self.process.exitcode

    def stop(self) -> None:
        """Have it print where each of its threads stands, and end it."""
        self.send_signal(signal.SIGUSR1)
        self.process.join(1)
        self.process.kill()
        self.process.join()

    def succeed(self) -> str:
        """Wait, and what it printed."""
        assert self.wait() == 0, self.out[-2000:] + self.err[-4000:]
        return self.out

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()


def _run(
    files: tuple[Path, Path],
    environment: Mapping[str, str],
    folder: str,
    run: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    run(*arguments)


def command(folder: Path, *arguments: object, **environment: str) -> Running:
    """``l2r ARGUMENTS`` in a process of its own."""
    return Running(folder, _command, [str(argument) for argument in arguments], **environment)


def _command(arguments: list[str]) -> None:
    from l2r.cli import main

    sys.argv = ["l2r", *arguments]
    main(arguments)


def in_turn(commands: Sequence[Sequence[str]]) -> None:
    """``l2r ARGUMENTS`` one after another in this process."""
    from l2r.cli import main

    for arguments in commands:
        try:
            main(list(arguments))
        except SystemExit as end:
            if end.code:
                raise


def script(folder: Path, code: str, **environment: str) -> Running:
    """Python code in a process of its own."""
    return Running(folder, _script, code, **environment)


def _script(code: str) -> None:
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})


def on_ranks(world: int, folder: Path, start: Callable[..., Running], *arguments: object) -> None:
    """The same, started by ``start``, on several ranks that find each other as under torchrun.

    One that fails ends them all: the others would wait for it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = [
        start(folder / str(rank), *arguments, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(world)
    ]
    living, until = ranks, time.monotonic() + 480
    while living and not any(rank.process.exitcode for rank in ranks):
        left = max(0, until - time.monotonic())
        if not connection.wait([rank.process.sentinel for rank in living], left):
            break
        living = [rank for rank in living if rank.process.exitcode is None]
    for rank in living:
        rank.stop()
    said = (
        f"rank {n}: {r.process.exitcode}\n{r.out[-2000:]}{r.err[-6000:]}"
        for n, r in enumerate(ranks)
    )
    assert not any(rank.process.exitcode for rank in ranks), "\n".join(said)


def on_two_ranks(
    run: Callable[..., Any], folder: Path, *arguments: Any, within: float = 300
) -> tuple[Any, Any]:
    """Run ``run(rank, *arguments)`` on two gloo ranks; both results.

    Ranks that do not end ``within`` so many seconds, each waiting for the other, are ended.
    """
    with mp.Manager() as manager:
        results, until = manager.dict(), time.monotonic() + within
        ranks = mp.start_processes(
            _rank,
            args=(str(folder / "store"), run, results, arguments),
            nprocs=2,
            join=False,
            start_method="forkserver",
        )
        while not ranks.join(max(0, until - time.monotonic())):
            if time.monotonic() >= until:
                for process in ranks.processes:
                    process.kill()
                    process.join()
                raise TimeoutError(f"ranks did not end within {within} s")
        return results[0], results[1]


def _rank(
    rank: int, store: str, run: Callable[..., Any], results: Any, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results[rank] = run(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
