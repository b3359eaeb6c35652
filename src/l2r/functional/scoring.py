"""Projection, scoring and pooling: router input to query to logits (paper, Sections 3.2 to 3.4).

Scores map queries [T, R] and anchors [N, H, R] to one score per anchor [T, N, H].
Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

EPS = 1e-6  # lower bound of |q| and |k| inside cosines (Eq. 16); a zero query then scores 0
Scoring = Literal["dot", "cosine", "sips"]


class ScoreConstants(NamedTuple):
    """Constants of a router's logits, in the order of the structure in ``native/router.h``.

    scoring: kind of the score. gamma, beta, p: constants of phi and psi. eps: smallest length
    divided by. scale: factor of the pooled logits, one over the temperature. norm_eps: constant
    of the RMSNorm before the projection.
    """

    scoring: Scoring = "dot"
    gamma: float = 1.0
    beta: float = 1.0
    p: float = 4.0
    eps: float = EPS
    scale: float = 1.0
    norm_eps: float = 1e-5


DEFAULTS = ScoreConstants()


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


def dot_scores(
    query: Float[Tensor, "T R"],
    anchors: Float[Tensor, "N H R"],
) -> Float[Tensor, "T N H"]:
    """Dot product, Eq. 7: z = q . k; it grows with both norms, without bound."""
    return torch.einsum("tr,nhr->tnh", query, anchors)


def cosine_scores(
    query: Float[Tensor, "T R"],
    anchors: Float[Tensor, "N H R"],
    *,
    eps: float = EPS,
) -> Float[Tensor, "T N H"]:
    """Cosine of the angle between query and anchor; in [-1, 1], blind to both norms."""
    return dot_scores(unit(query, eps=eps), unit(anchors, eps=eps))


def sips_scores(
    query: Float[Tensor, "T R"],
    anchors: Float[Tensor, "N H R"],
    *,
    gamma: float = 1.0,
    beta: float = 1.0,
    p: float = 4.0,
    rho_hat: Float[Tensor, " T"] | None = None,
    eps: float = EPS,
) -> Float[Tensor, "T N H"]:
    r"""Saturated inner-product scoring, Eq. 8 and 12: phi(|q|) psi(|k|) cos(q, k).

    ``rho_hat`` is the normalized query norm that phi sees; |q| itself when not given.
    Bounded by gamma * (1 + beta) * psi(|k|), whatever the size of the query.
    """
    if rho_hat is None:
        rho_hat = torch.linalg.vector_norm(query, dim=-1)
    query_term = phi(rho_hat, gamma=gamma, beta=beta)
    anchor_term = psi(torch.linalg.vector_norm(anchors, dim=-1), p=p)
    return query_term[:, None, None] * anchor_term * cosine_scores(query, anchors, eps=eps)


def phi(
    rho_hat: Float[Tensor, "*T"],
    *,
    gamma: float,
    beta: float,
) -> Float[Tensor, "*T"]:
    """Query magnitude transform, Eq. 9: gamma (1 + beta tanh(rho_hat)).

    Lies in [gamma (1 - beta), gamma (1 + beta)] (Eq. 10); from gamma up when rho_hat >= 0.
    """
    return gamma * (1 + beta * torch.tanh(rho_hat))


def psi(kappa: Float[Tensor, "*K"], *, p: float) -> Float[Tensor, "*K"]:
    """Anchor magnitude transform, Eq. 11: 1 + (|k| - 1) / p; equals 1 on the unit sphere."""
    return 1 + (kappa - 1) / p


def unit(vectors: Float[Tensor, "*B R"], *, eps: float = EPS) -> Float[Tensor, "*B R"]:
    """Divide every vector by its norm, or by eps where the norm is smaller."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / norms.clamp_min(eps)


def pool_anchors(scores: Float[Tensor, "T N H"]) -> Float[Tensor, "T N"]:
    """Log-sum-exp over the anchors of every expert, Eq. 13; the identity for one anchor.

    Between max_h z and max_h z + log(H): a smooth maximum whose gradient is a softmax.
    """
    return torch.logsumexp(scores, dim=-1)
