"""Experts split over GPUs, as the simulation sees one of them: its share, and what others send.

Our own loop trains with ddp and fsdp2; this is what an engine with expert parallelism holds.
"""

import math
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from l2r.functional.autocast import product_inputs
from l2r.moe.grouped import grouped_linear
from l2r.moe.token_dispatch import by_expert


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
