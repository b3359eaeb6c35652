"""Stands in for a helper of transformers' tests that its source distribution leaves out."""

import functools
import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

Ranked = Callable[..., object]

# One process imports everything and is then copied: starting a rank takes no seconds.
multiprocessing.set_forkserver_preload(
    ["tests.test_tensor_parallel_mixin", "tests.test_expert_parallel_mixin", "l2r.hf.models.olmoe"]
)


def run_distributed(world_size: int) -> Callable[[Ranked], Callable[..., None]]:
    """Run a function ``(rank, *args)`` in ``world_size`` gloo processes; raises what they raise."""

    def decorate(function: Ranked) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*args: Any) -> None:
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                port = probe.getsockname()[1]
            start_processes(  # type: ignore[no-untyped-call]
                _rank,
                args=(world_size, port, function, args),
                nprocs=world_size,
                start_method="forkserver",
            )

        return run

    return decorate


def _rank(rank: int, world_size: int, port: int, function: Ranked, args: tuple[Any, ...]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    function(rank, *args)
    dist.barrier()
    dist.destroy_process_group()
