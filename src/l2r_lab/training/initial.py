"""Initial weights on many ranks: the first rank draws them, and no other holds more than its own.

The numbers are those of one process, to the bit, for any number of ranks: the first rank builds the
model as one process does, and every module leaves for the ranks when its weights are drawn.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from l2r.hf.models import watch_initialized
from l2r.routers import Router
from l2r_lab.training.ranks import Ranks
from l2r_lab.training.task import Task


@dataclass
class ShardedWeights:
    """Rows of this rank of every parameter, in the order in which they were drawn.

    places: position in ``rows`` by the parameter's name; two names share one where weights are
    tied. buffers: whole, by name.
    """

    mesh: DeviceMesh
    rows: list[DTensor] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def put_into(self, model: nn.Module) -> None:
        """Give a model of meta parameters its weights, after FSDP2 took it apart."""
        parameters = [nn.Parameter(rows) for rows in self.rows]
        state = {name: parameters[place] for name, place in self.places.items()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            state[name].requires_grad_(parameter.requires_grad)
        model.load_state_dict(state, strict=False, assign=True)
        for name, value in self.buffers.items():
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._buffers[own] = value.to(self.mesh.device_type)


def build_model(task: Task, parallel: str, ranks: Ranks) -> tuple[nn.Module, ShardedWeights | None]:
    """Build the model of a run on this rank.

    One process, or weights that are read from files: the whole model, on the CPU. DDP: the same on
    the first rank, from which DDP sends it; a model on the meta device on the others. FSDP2: a
    model on the meta device, and the weights that go into it once it is sharded.

    The random state afterwards is that of one process.
    """
    if ranks.world == 1 or not task.draws_weights:
        return task.build_model(), None
    if parallel == "ddp":
        with nullcontext() if ranks.first else torch.device("meta"):
            model = task.build_model()
        _share_random_state()
        return model, None
    weights = ShardedWeights(init_device_mesh(ranks.device.type, (ranks.world,)))
    model = _draw(task, weights) if ranks.first else _receive(task, weights)
    _share_random_state()
    return model, weights


def _draw(task: Task, weights: ShardedWeights) -> nn.Module:
    """Build the model on the first rank and send every parameter; what is left of it is on meta."""
    places: dict[int, int] = {}

    def send(module: nn.Module, *, recurse: bool) -> None:
        for name, parameter in list(module.named_parameters(recurse=recurse)):
            if parameter.is_meta:
                continue
            owner, _, own = name.rpartition(".")
            empty = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            _exchange((tuple(parameter.shape), parameter.dtype))
            weights.rows.append(_cut(parameter.detach(), weights.mesh))
            module.get_submodule(owner)._parameters[own] = empty
            places[id(empty)] = len(weights.rows) - 1

    # The modules inside a router have no turn of their own.
    with watch_initialized(lambda module: send(module, recurse=isinstance(module, Router))):
        model = task.build_model()
    send(model, recurse=True)  # what was not initialized by transformers' walk
    named = model.named_parameters(remove_duplicate=False)
    weights.places = {name: places[id(parameter)] for name, parameter in named}
    weights.buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
    _exchange(None)
    _exchange((weights.places, weights.buffers))
    return model


def _receive(task: Task, weights: ShardedWeights) -> nn.Module:
    with torch.device("meta"):
        model = task.build_model()
    device = weights.mesh.device_type
    while (announced := _exchange()) is not None:
        shape, dtype = announced  # of a tensor that the first rank alone fills
        weights.rows.append(_cut(torch.empty(shape, dtype=dtype, device=device), weights.mesh))
    weights.places, weights.buffers = _exchange()
    return model


def _cut(value: Tensor, mesh: DeviceMesh) -> DTensor:
    """Rows of this rank of what the first rank holds; a scalar as a vector, as FSDP2 wants it."""
    return distribute_tensor(value.reshape(1) if value.dim() == 0 else value, mesh, [Shard(0)])


def _exchange(value: Any = None) -> Any:
    """Return what the first rank gives. Every rank must call this."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _share_random_state() -> None:
    torch.set_rng_state(_exchange(torch.get_rng_state()))
