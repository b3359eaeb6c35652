"""Parallelize a model over the ranks: DDP, or FSDP2 per block; and the switches of both."""

import contextlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from l2r.routers import Router
from l2r_lab.training.initial import ShardedWeights
from l2r_lab.training.ranks import Ranks

_SYNC_BUFFERS = (  # of every forward; before torch 2.12 by its old name
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def parallelize(
    model: nn.Module, kind: str, ranks: Ranks, weights: ShardedWeights | None = None
) -> nn.Module:
    """Return the model ready for training on this rank's device; unchanged in a single process.

    ``weights`` are those of a model on the meta device that is to be sharded.
    """
    if ranks.world == 1:
        return model.to(ranks.device)
    if kind == "ddp":
        model = _on_device(model, ranks.device)
        ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        # Running statistics of the norm's BatchNorm are already the same on every rank.
        switch: Any = {_SYNC_BUFFERS: False}
        return DistributedDataParallel(model, device_ids=ids, **switch)
    if weights is not None:
        weights.put_into(shard(model, weights.mesh))
        return model
    # Block by block: the device never holds the whole model.
    return shard(model, init_device_mesh(ranks.device.type, (ranks.world,)))


def _on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model; one on the meta device gets memory, and its numbers from DDP's first rank."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(device)
    model = model.to_empty(device=device)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    return model


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2: every block, and what is around them, split over the ranks of the mesh."""
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.lift_scalars()
    for block in transformer_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def compile_blocks(model: nn.Module) -> None:
    """torch.compile of every block.

    Routers stay outside of the graphs: they are fused already, and what looks on through hooks is
    another object in every step, for which a graph would have to be compiled again.
    """
    for router in (module for module in model.modules() if isinstance(module, Router)):
        call: Any = router._call_impl
        router._compiled_call_impl = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    for block in transformer_blocks(model):
        block.compile()


def whole_model(model: nn.Module) -> nn.Module:
    """Return the model inside a DDP wrapper, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def accumulate(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Keep gradients on this rank until the last micro-batch of a step."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    yield


def gathered_weights(model: nn.Module) -> dict[str, Any]:
    """Full weights on the CPU of rank 0; empty on other ranks. A collective call."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: dict[str, Any] = get_model_state_dict(model, options=options)
    lifted = [name for name in weights if name.endswith(".log_temperature")]
    return weights | {name: weights[name].reshape(()) for name in lifted}


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return transformer blocks: the entries of the longest ModuleList."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len) if lists else []


def autocast_to(name: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast for bf16, nothing for fp32."""
    if name == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def same_draws(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Put the random states of the CPU and of a GPU back after the block."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.random.fork_rng(devices=[device] if on_gpu else [])


RandomState = tuple[bytes, ...]


def random_state(device: torch.device) -> RandomState:
    """Random state of the CPU, and of a GPU."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return tuple(bytes(state.numpy()) for state in states)


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Go back to a random state."""
    cpu, *gpu = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in state)
    torch.set_rng_state(cpu)
    for part in gpu:
        torch.cuda.set_rng_state(part, device)


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Put running statistics back after a forward that does not count."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.copy_(value)
