"""Peak memory of one training step by torch's own simulation: fake tensors and its trackers.

The step is the loop's own: its loss, autocast, auxiliary losses, FSDP2, clipping and AdamW, on
tensors that have shapes and no storage. They are CPU tensors, so that the code is the one that
measured runs take; a GPU's kernels keep the same tensors for the backward pass. Where experts are
split over GPUs (our own loop trains with ddp and fsdp2 alone), one of them has its share of the
experts and what others send. The start needs less: a rank then holds its rows and one parameter
whole (training/initial.py), and a step gathers every parameter.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Function
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from l2r.functional.autocast import product_inputs
from l2r.hf.models import checkpoint_activations
from l2r.moe.grouped import grouped_linear
from l2r.moe.token_dispatch import by_expert
from l2r.routers import capture, constrain
from l2r_lab.planning.cut import StepCut
from l2r_lab.planning.sizes import example_batch, meta_model
from l2r_lab.training import (
    accumulate,
    autocast_to,
    auxiliary_losses,
    build_optimizer,
    expert_loads,
    layer_usage,
    shard,
    task_class,
)
from l2r_lab.training.recipes import AnyRecipe


def split_experts(model: nn.Module, ranks: int, imbalance: float) -> None:
    """Leave every ``experts`` module of a language model its share of the weights."""
    for name, experts in model.named_modules():
        if name.endswith(".experts"):
            for key, weight in list(experts.named_parameters()):
                share = weight.detach()[: weight.shape[0] // ranks].clone()
                setattr(experts, key, nn.Parameter(share))
            experts.forward = _Share(experts, imbalance)


class _Share:
    """Forward of the experts on the most loaded GPU."""

    def __init__(self, experts: Any, imbalance: float) -> None:
        self.experts, self.imbalance = experts, imbalance

    def __call__(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        own = self.experts
        plan = by_expert(indices, own.num_experts)
        rows, _ = product_inputs(plan.spread(x), own.down_proj)  # travel in the compute dtype
        received = _exchange(rows, math.ceil(rows.shape[0] * self.imbalance))
        ends = plan.ends[: own.down_proj.shape[0]]
        hidden = own._apply_gate(grouped_linear(received, own.gate_up_proj, ends))
        outputs = _exchange(grouped_linear(hidden, own.down_proj, ends), rows.shape[0])
        return plan.combine(outputs, weights).to(x.dtype)


class _Exchange(Function):
    """An all-to-all by its shapes: rows go, others come, and the same way back for gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int) -> Tensor:
        ctx.count = rows.shape[0]
        return rows.new_empty(count, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(ctx.count, grad.shape[1]), None


def _exchange(rows: Tensor, count: int) -> Tensor:
    received: Tensor = _Exchange.apply(rows, count)  # type: ignore[no-untyped-call]
    return received


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Simulated:
    """Bytes on one GPU. ``peak``: the most at once in a step after the first.

    weights, gradients, optimizer: what every step ends with. buckets: in which ddp sends gradients.
    """

    peak: int
    weights: int
    gradients: int
    optimizer: int
    buckets: int


def simulate(recipe: AnyRecipe, cut: StepCut) -> Simulated:
    """Walk through a step of the recipe under ``cut``; its parts after the second are alike."""
    model: Any = meta_model(recipe)
    with _mesh(cut) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        ranks = cut.expert_ranks(model.config.num_experts)
        if ranks > 1:
            split_experts(model, ranks, cut.imbalance)
        if cut.checkpointing:
            checkpoint_activations(model)
        if mesh is not None:
            shard(model, mesh)
        optimizer = build_optimizer(model, recipe.optimizer)
        if mesh is not None:
            tracker: MemTracker = FSDPMemTracker(model, optimizer)
        else:
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
        with tracker:
            peak = _backward(recipe, cut, model, tracker)
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.training.clip_norm)
            optimizer.step()
            constrain(model)
            after = _bytes(tracker, "current")
    weights = after.get("Parameter", 0) + after.get("Sharded Param", 0) + after["Buffer"]
    gradients = after.get("Gradient", 0) + after.get("Sharded Grad", 0)
    slots = after.get("Optstate", 0) + after.get("OptState", 0)
    average = weights if recipe.training.ema_decay else 0
    buckets = gradients if cut.parallel != "fsdp2" and cut.gpus > 1 else 0
    # The first step makes the optimizer's state at its end, with its temporaries; every
    # later one begins with it and works in place.
    return Simulated(
        peak=max(peak + slots, after["Total"]) + average + buckets,
        weights=weights + average,
        gradients=gradients,
        optimizer=slots,
        buckets=buckets,
    )


def _backward(recipe: AnyRecipe, cut: StepCut, model: nn.Module, tracker: MemTracker) -> int:
    """Forward and backward of one micro-batch, or of two where gradients gather; the peak."""
    model.train()
    parts = min(cut.parts, 2)
    for number in range(parts):
        tracker.reset_mod_stats()
        with accumulate(model, last=number + 1 == parts):
            (_loss(recipe, model, cut.micro_batch) / parts).backward()
    return _bytes(tracker, "peak")["Total"]


def _loss(recipe: AnyRecipe, model: nn.Module, micro_batch: int) -> Any:
    """Return the objective of one micro-batch, as the loop computes it."""
    batch = example_batch(recipe, model, micro_batch)
    with autocast_to(recipe.training.precision, _CPU):
        with capture(model) as captured:
            loss = task_class(recipe).loss(model, batch, recipe.training.loss_chunk)
        usage = layer_usage(captured, recipe.losses, expert_loads(captured))
        return loss + auxiliary_losses(captured, recipe.losses, usage=usage)[0]


def _bytes(tracker: MemTracker, which: str) -> dict[str, int]:
    """Bytes by kind, ``Total`` among them."""
    snapshot: Any = tracker.get_tracker_snapshot(which)
    return {getattr(kind, "value", kind): count for kind, count in snapshot[_CPU].items()}


@contextmanager
def _mesh(cut: StepCut) -> Iterator[DeviceMesh | None]:
    """Ranks that only this process pretends to have, for fsdp2."""
    if cut.parallel != "fsdp2" or cut.gpus == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=cut.gpus, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (cut.gpus,))
    finally:
        dist.destroy_process_group()
