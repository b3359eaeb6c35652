"""The two query norms of the paper: RMSNorm of the router input, BatchNorm of the norm |q|."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from l2r.functional import standardize_magnitude
from l2r.routers.holder import Holder


class InputNormGain(Holder):
    """Learned gain [D] of the RMSNorm before W_q; the norm itself runs inside the kernel."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class MagnitudeBatchNorm(nn.Module):
    """BatchNorm of the scalar query norm, with the statistics of all ranks.

    Training uses the batch's mean and variance and updates the running ones; evaluation uses
    the running ones. Parameters: weight [1], bias [1].
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, *, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("running_mean", torch.zeros(1))
        self.register_buffer("running_var", torch.ones(1))

    def reset_parameters(self) -> None:
        """Gain 1, shift 0, running statistics of a unit normal."""
        for tensor, value in (
            (self.weight, 1),
            (self.bias, 0),
            (self.running_mean, 0),
            (self.running_var, 1),
        ):
            tensor.detach().fill_(value)

    def forward(self, rho: Tensor) -> Tensor:
        """Standardize norms [T]; any dtype."""
        mean, var = self.running_mean, self.running_var
        if self.training and rho.numel() > 0:
            mean, var = self._batch_statistics(rho)
        return standardize_magnitude(
            rho,
            mean.to(rho.dtype).squeeze(),
            var.to(rho.dtype).squeeze(),
            self.weight.to(rho.dtype).squeeze(),
            self.bias.to(rho.dtype).squeeze(),
            eps=self.eps,
        )

    def _batch_statistics(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        sums = _over_ranks(torch.stack([torch.ones_like(rho).sum(), rho.sum()]))
        count = sums[0].detach()
        mean = sums[1] / count
        # The mean of the squares less the square of the mean would be rounding alone where the
        # norms are nearly equal.
        var = _over_ranks((rho - mean).square().sum()) / count
        if _recomputing():
            return mean, var
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp_min(1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype).view(1), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype).view(1), self.momentum)
        return mean, var


def _over_ranks(sums: Tensor) -> Tensor:
    """The sum over all ranks, with its gradient; the tensor itself in a single process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return sums
    return sum_over_ranks(sums)


def sum_over_ranks(value: Tensor, group: "dist.ProcessGroup | None" = None) -> Tensor:
    """The sum over the ranks of a group, by default all; its gradient is summed likewise."""
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
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _recomputing() -> bool:
    """Whether activation checkpointing runs this forward again, inside backward.

    The running statistics have taken in the batch by then.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
