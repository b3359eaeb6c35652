"""The processes of one run: who am I, which device, and the few collectives the loop needs."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from l2r.errors import environment_number

_groups = itertools.count()
# Groups that were left. A model under DDP may be freed after its group was left; were its
# reference the last, it would free the group under the GIL, and wait for a thread of gloo that
# waits for the GIL.
_left: list[dist.ProcessGroup | None] = []
Value = TypeVar("Value", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Ranks:
    """This process among ``world`` processes."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Tell whether this process prints and writes."""
        return self.rank == 0

    def sum(self, value: Tensor) -> Tensor:
        """Sum of a tensor over all ranks, no gradient; in one process the tensor itself."""
        if self.world == 1:
            return value
        total = value.clone()  # others may hold the value: a load is counted for several sums
        dist.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Tell whether any rank raised its flag."""
        if self.world == 1:
            return flag
        return bool(self.sum(torch.tensor(int(flag))).item())  # on the CPU: no GPU is waited for

    def least(self, value: Value | None) -> Value | None:
        """Find the least value that a rank has, None if none has one. Every rank must call this."""
        if self.world == 1:
            return value
        values: list[Value | None] = [None] * self.world
        dist.all_gather_object(values, value)
        return min((one for one in values if one is not None), default=None)

    def wait(self) -> None:
        """Barrier."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the processes torchrun started, or be the only one.

    One GPU per process when there are any, else the CPU with gloo.
    """
    world = environment_number("WORLD_SIZE", 1)
    rank = environment_number("RANK", 0)
    local = environment_number("LOCAL_RANK", 0)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if world == 1:
        yield Ranks(0, 1, device)
        return
    # torchrun's store outlives a group, so that a second one needs other keys.
    store = PrefixStore(f"l2r-{next(_groups)}", next(rendezvous("env://"))[0])
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield Ranks(rank, world, device)
        dist.barrier()  # gloo processes can abort when one leaves before the others are done
    finally:
        _left.append(dist.group.WORLD)
        dist.destroy_process_group()
