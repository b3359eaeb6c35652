"""Dropless dispatch: bring every token to its experts and back, in expert order.

Shape letters: T tokens, D hidden size, N experts, K experts per token, S = T * K assignments.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Assignment(NamedTuple):
    """The S assignments sorted by expert.

    order [S]: position in the flattened [T, K] indices. token [S]: which token it is.
    ends [N], int32: end of each expert's segment. expert [S]: expert of each row.
    """

    order: Int[Tensor, " S"]
    token: Int[Tensor, " S"]
    ends: Int[Tensor, " N"]
    expert: Int[Tensor, " S"]


def assign(indices: Int[Tensor, "T K"], num_experts: int) -> Assignment:
    """Sort assignments by expert, tokens in their own order within one expert."""
    expert, order = torch.sort(indices.flatten(), stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=indices.device)
    counts = counts.scatter_add(0, expert, torch.ones_like(expert, dtype=torch.int32))
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    return Assignment(order, order // indices.shape[1], ends, expert)


def combine(
    outputs: Float[Tensor, "S D"],
    weights: Float[Tensor, "T K"],
    order: Int[Tensor, " S"],
) -> Float[Tensor, "T D"]:
    """Weighted sum of each token's K expert outputs, Eq. 3 without the residual.

    Gathers and sums instead of adding in place, so the result does not depend on thread order.
    """
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    per_token = outputs[inverse].view(*weights.shape, outputs.shape[-1])
    return torch.einsum("tkd,tk->td", per_token, weights.to(outputs.dtype))


def grouped_linear(
    x: Float[Tensor, "S I"],
    weight: Float[Tensor, "N O I"],
    ends: Int[Tensor, " N"],
) -> Float[Tensor, "S O"]:
    """Apply expert n's matrix to rows ends[n-1]:ends[n] of x.

    One grouped matrix product in fp32, bf16 and fp16; a loop for float64, which it refuses.
    """
    if x.dtype == torch.float64:
        segments = zip([0, *ends[:-1].tolist()], ends.tolist(), weight, strict=True)
        return torch.cat([x[start:end] @ matrix.T for start, end, matrix in segments])
    return torch.nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)
