"""Two gloo processes that run one function each and hand back what they found."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank, store, run, results, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results[rank] = run(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks(run, folder, *arguments):
    """What ``run(rank, *arguments)`` returns on either rank."""
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, args=(str(folder / "store"), run, results, arguments), nprocs=2)
        return results[0], results[1]
