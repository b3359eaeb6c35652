"""Batch norms over all ranks: of the norm |q| of the query (the paper's, for vision), and of q."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from l2r.functional import standardize_magnitude


class _BatchNorm(nn.Module):
    """Gain, shift and running statistics [R], and the statistics of a batch over all ranks."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, size: int, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def reset_parameters(self) -> None:
        """Gain 1, shift 0, running statistics of a unit normal."""
        for tensor, value in (
            (self.weight, 1),
            (self.bias, 0),
            (self.running_mean, 0),
            (self.running_var, 1),
        ):
            tensor.detach().fill_(value)

    def statistics(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance [R] of values [T, R], or [T] where R is 1.

        In training those of the batch of all ranks, which also update the running statistics; in
        evaluation, or without a token, the running statistics. A rank without tokens takes part.
        """
        if not self.training or (len(values) == 0 and not _several_ranks()):
            return self.running_mean, self.running_var
        values = values.to(torch.promote_types(values.dtype, torch.float32))  # sums of many
        tokens = values.new_full((1,), len(values))
        sums = _over_ranks(torch.cat([tokens, values.sum(dim=0).view(-1)]))
        count = sums[0].detach().clamp_min(1)
        mean = sums[1:] / count
        # The mean of the squares less the square of the mean would be rounding alone where the
        # values are nearly equal.
        var = _over_ranks((values - mean).square().sum(dim=0).view(-1)) / count
        if _recomputing():
            return mean, var
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp_min(1))
            some = sums[0].sign().to(self.running_mean.dtype)  # 0 where no rank has a token
            momentum = self.momentum * some
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return mean, var


class MagnitudeBatchNorm(_BatchNorm):
    """BatchNorm of the scalar query norm, with the statistics of all ranks.

    Training uses the batch's mean and variance and updates the running ones; evaluation uses
    the running ones. Parameters: weight [1], bias [1].
    """

    def __init__(self, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(1, eps=eps, momentum=momentum)

    def forward(self, rho: Tensor) -> Tensor:
        """Standardize norms [T]; any dtype."""
        mean, var = self.statistics(rho)
        parts = (mean, var, self.weight, self.bias)
        return standardize_magnitude(
            rho, *(part.to(rho.dtype).squeeze() for part in parts), eps=self.eps
        )


class QueryBatchNorm(_BatchNorm):
    """BatchNorm of every entry of a query, with the statistics of all ranks.

    Training and evaluation differ as in ``MagnitudeBatchNorm``. Parameters: weight [R], bias [R].
    """

    def forward(self, query: Tensor) -> Tensor:
        """Standardize queries [T, R]; any dtype."""
        mean, var, gain, shift = (
            part.to(query.dtype) for part in (*self.statistics(query), self.weight, self.bias)
        )
        return (query - mean) * torch.rsqrt(var + self.eps) * gain + shift


def _over_ranks(sums: Tensor) -> Tensor:
    """Return the sum over all ranks, with its gradient; the tensor itself in a single process."""
    return sum_over_ranks(sums) if _several_ranks() else sums


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(value: Tensor, group: "dist.ProcessGroup | None" = None) -> Tensor:
    """Return the sum over the ranks of a group, by default all; its gradient is summed likewise."""
    total: Tensor = _SumOverRanks.apply(value, group)  # type: ignore[no-untyped-call]
    return total


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: "dist.ProcessGroup | None") -> Tensor:
        ctx.group, total = group, value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_over_ranks(gradient.contiguous(), ctx.group), None  # which has a gradient too


def _recomputing() -> bool:
    """Tell whether activation checkpointing runs this forward again, inside backward.

    The first forward has already updated the running statistics.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
