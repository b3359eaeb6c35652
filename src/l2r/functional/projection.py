"""Projection: router input x to routing query q (paper, Sections 3.2 and 3.3).

Shape letters: T tokens, D hidden size, R rank.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    x: Float[Tensor, "T D"],
    gain: Float[Tensor, " D"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "T D"]:
    """RMSNorm of the router input: x / sqrt(mean(x^2) + eps), times an optional gain.

    The paper normalizes the router input of language models this way, before W_q.
    """
    normalized = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return normalized if gain is None else normalized * gain


def low_rank_query(
    x: Float[Tensor, "T D"],
    projection: Float[Tensor, "R D"],
) -> Float[Tensor, "T R"]:
    """Shared low-rank routing query, Eq. 6: q = x W_q, with W_q stored as its transpose."""
    return x @ projection.T


def magnitude(query: Float[Tensor, "T R"]) -> Float[Tensor, " T"]:
    """Euclidean norm of every query, rho = |q|."""
    return torch.linalg.vector_norm(query, dim=-1)


def standardize_magnitude(
    rho: Float[Tensor, " T"],
    mean: Float[Tensor, ""],
    variance: Float[Tensor, ""],
    gain: Float[Tensor, ""],
    shift: Float[Tensor, ""],
    *,
    eps: float = 1e-5,
) -> Float[Tensor, " T"]:
    """BatchNorm of the scalar norm |q|, which the paper uses for vision models.

    The result can be negative, so phi reaches the whole interval of Eq. 10.
    """
    return (rho - mean) * torch.rsqrt(variance + eps) * gain + shift
