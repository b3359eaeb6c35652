"""Stands in for a helper of transformers' tests that its source distribution leaves out."""

import functools
import multiprocessing
import os
import socket

import torch.distributed as dist
import torch.multiprocessing as torch_multiprocessing

# One process imports everything and is then copied: starting a rank takes no seconds.
multiprocessing.set_forkserver_preload(
    ["tests.test_tensor_parallel_mixin", "tests.test_expert_parallel_mixin", "l2r.models.olmoe"]
)


def run_distributed(world_size):
    """Run a function ``(rank, *args)`` in ``world_size`` gloo processes; raises what they raise."""

    def decorate(function):
        @functools.wraps(function)
        def run(*args):
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                port = probe.getsockname()[1]
            torch_multiprocessing.start_processes(
                _rank,
                args=(world_size, port, function, args),
                nprocs=world_size,
                start_method="forkserver",
            )

        return run

    return decorate


def _rank(rank, world_size, port, function, args):
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
