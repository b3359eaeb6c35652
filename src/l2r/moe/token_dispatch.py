"""Dropless dispatch: bring every token to its experts and back, in expert order.

Both ways are one pass over the rows, forward and backward: a gather out, and a weighted sum of
K gathered rows back (``embedding_bag``), each the other's gradient. No [T, K, D] copy is made,
and nothing is added in place, so results do not depend on thread order.

Shape letters: T tokens, D hidden size, N experts, K experts per token, S = T * K assignments.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from l2r.kernels.tracing import traced, transformed
from l2r.moe.grouped import grouped_linear


class ByExpert(NamedTuple):
    """The S assignments sorted by expert.

    order [S]: position in the flattened [T, K] indices. token [S]: which token it is.
    ends [N], int32: end of each expert's segment. expert [S]: expert of each row.
    """

    order: Int[Tensor, " S"]
    token: Int[Tensor, " S"]
    ends: Int[Tensor, " N"]
    expert: Int[Tensor, " S"]

    def spread(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "S D"]:
        """Rows of x in the order of the assignments."""
        # Skip the Function: torch.func rejects it, and decoding needs no gradient.
        if not torch.is_grad_enabled() or transformed():
            return x.index_select(0, self.token)
        rows: Tensor = _Spread.apply(x, self.token, self.order)  # type: ignore[no-untyped-call]
        return rows

    def linear(
        self, rows: Float[Tensor, "S I"], weight: Float[Tensor, "N O I"]
    ) -> Float[Tensor, "S O"]:
        """Every row times the matrix of its expert."""
        return grouped_linear(rows, weight, self.ends)

    def combine(
        self, outputs: Float[Tensor, "S D"], weights: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T D"]:
        """Weighted sum of each token's K expert outputs, Eq. 3 without the residual."""
        weights = weights.to(outputs.dtype)
        if transformed():
            return _weighted(outputs.index_select(0, _inverse(self.order)), weights)
        if not torch.is_grad_enabled():
            return _sum_rows(outputs, _inverse(self.order).view_as(weights), weights)
        total: Tensor = _Combine.apply(outputs, weights, self.order)  # type: ignore[no-untyped-call]
        return total


class ByRow(NamedTuple):
    """S assignments in the order of the tokens, for few tokens on a CPU.

    On a CPU the grouped product loops over all experts, the empty ones included, and for few tokens
    sorting costs more than it saves. expert [S]: expert of each row; experts: the same as integers.
    """

    expert: Int[Tensor, " S"]
    experts: list[int]

    def spread(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "S D"]:
        """Every row of x K times."""
        return x.repeat_interleave(len(self.experts) // x.shape[0], dim=0)

    def linear(
        self, rows: Float[Tensor, "S I"], weight: Float[Tensor, "N O I"]
    ) -> Float[Tensor, "S O"]:
        """Every row times the matrix of its expert."""
        pairs = zip(rows.unsqueeze(1), self.experts, strict=True)
        return torch.cat([torch.nn.functional.linear(row, weight[n]) for row, n in pairs])

    def combine(
        self, outputs: Float[Tensor, "S D"], weights: Float[Tensor, "T K"]
    ) -> Float[Tensor, "T D"]:
        """Weighted sum of each token's K expert outputs, Eq. 3 without the residual."""
        return _weighted(outputs, weights.to(outputs.dtype))


def assign(
    x: Float[Tensor, "T D"], indices: Int[Tensor, "T K"], num_experts: int
) -> ByExpert | ByRow:
    """Plan the dispatch of a layer: rows sorted by expert, or one by one if few."""
    if x.device.type == "cpu" and 0 < indices.numel() <= num_experts and _only_inference(x):
        return ByRow(indices.flatten(), indices.flatten().tolist())
    return by_expert(indices, num_experts)


def by_expert(indices: Int[Tensor, "T K"], num_experts: int) -> ByExpert:
    """Sort assignments by expert, tokens in their own order within one expert."""
    expert, order = torch.sort(indices.flatten(), stable=True)
    every = torch.arange(num_experts, device=indices.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, every, right=True, out_int32=True)
    return ByExpert(order, order // indices.shape[1], ends, expert)


def _only_inference(x: Tensor) -> bool:
    """No gradients and nothing that would have to trace a loop over numbers."""
    return not (torch.is_grad_enabled() or traced(x) or transformed())


class _Spread(torch.autograd.Function):
    """Gather rows; the gradient of a token is the sum over its K rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens = x.shape[0]
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        places = _inverse(order).view(ctx.tokens, order.shape[0] // max(1, ctx.tokens))
        return _sum_rows(grad, places, None), None, None


class _Combine(torch.autograd.Function):
    """Weighted sum of rows; the gradient of a row is its weight times its token's gradient."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(outputs, weights, order)
        return _sum_rows(outputs, _inverse(order).view_as(weights), weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        outputs, weights, order = ctx.saved_tensors
        rows = grad.index_select(0, order // weights.shape[1])
        grad_outputs = grad_weights = None
        if ctx.needs_input_grad[1]:
            products = torch.linalg.vecdot(rows, outputs)
            grad_weights = products.index_select(0, _inverse(order)).view_as(weights)
        if ctx.needs_input_grad[0]:
            by_row = weights.reshape(-1).index_select(0, order)
            grad_outputs = rows * by_row.unsqueeze(1)
        return grad_outputs, grad_weights, None


def _weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum every token's K rows, which follow each other, times its weights."""
    by_token = rows.view(*weights.shape, rows.shape[1])
    return (weights.unsqueeze(1) @ by_token).squeeze(1)


def _sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Sum every token's rows at its K places, times its weights."""
    if places.shape[0] == 0:
        return rows.new_zeros(0, rows.shape[1])
    return torch.nn.functional.embedding_bag(
        places, rows.contiguous(), per_sample_weights=weights, mode="sum"
    )


def _inverse(order: Tensor) -> Tensor:
    """Row of every assignment: the inverse permutation."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)
