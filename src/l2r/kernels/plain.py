"""The unfused path: compositions of l2r.functional that every fused kernel must equal.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from l2r.functional import (
    best_experts,
    cosine_scores,
    dot_scores,
    low_rank_query,
    pool_anchors,
    rms_norm,
    sips_scores,
)
from l2r.functional.scoring import DEFAULTS, ScoreConstants
from l2r.functional.selection import softmax_weights

# A whole anchor router: projection [R, D], gain [D] of the RMSNorm before it, anchors [N, H, R].
KernelWeights = tuple[Tensor, Tensor | None, Tensor]
Routed = tuple[Tensor, Tensor, Tensor]  # logits [T, N], weights and indices [T, K]


def linear_logits(x: Float[Tensor, "T D"], weight: Float[Tensor, "N D"]) -> Float[Tensor, "T N"]:
    """Linear router, Eq. 4: z = x W_g, with W_g stored as its transpose."""
    return x.to(weight.dtype) @ weight.T


def routing_query(
    x: Float[Tensor, "T D"],
    projection: Float[Tensor, "R D"],
    gain: Float[Tensor, " D"] | None = None,
    score: ScoreConstants = DEFAULTS,
) -> Float[Tensor, "T R"]:
    """Query of the router input, Eq. 6; RMS-normalized with ``gain`` first when it is given.

    Computed in the dtype of the parameters, whatever that of x.
    """
    x = x.to(projection.dtype)
    return low_rank_query(x if gain is None else rms_norm(x, gain, eps=score.norm_eps), projection)


def anchor_logits(
    query: Float[Tensor, "T R"],
    anchors: Float[Tensor, "N H R"],
    score: ScoreConstants,
    rho_hat: Float[Tensor, " T"] | None = None,
) -> Float[Tensor, "T N"]:
    """Score every anchor and pool the anchors of an expert, Eq. 7 or 12, then 13; times scale."""
    scoring, gamma, beta, p, eps, scale, _ = score
    if scoring == "dot":
        scores = dot_scores(query, anchors)
    elif scoring == "cosine":
        scores = cosine_scores(query, anchors, eps=eps)
    else:
        scores = sips_scores(query, anchors, gamma=gamma, beta=beta, p=p, rho_hat=rho_hat, eps=eps)
    logits = pool_anchors(scores)
    return logits if scale == 1.0 else logits * scale


def softmax_top_k(
    logits: Float[Tensor, "T N"],
    top_k: int,
    *,
    normalize: bool = False,
    routes: Int[Tensor, "T K"] | None = None,
) -> tuple[Float[Tensor, "T K"], Int[Tensor, "T K"]]:
    """Softmax over experts and the k largest, Eq. 2 and 3; the logits decide which they are.

    ``routes`` replace that choice, but not for tokens whose first route is negative.
    """
    indices = followed(best_experts(logits, top_k), routes)
    return softmax_weights(logits, indices, normalize=normalize), indices


def followed(own: Int[Tensor, "T K"], routes: Int[Tensor, "T K"] | None) -> Int[Tensor, "T K"]:
    """Replace each token's own choice by its routes, unless its first route is negative."""
    return own if routes is None else torch.where(routes[:, :1] < 0, own, routes)


def route_logits(
    x: Float[Tensor, "T D"], parts: KernelWeights, score: ScoreConstants
) -> Float[Tensor, "T N"]:
    """Run a whole anchor router but the selection: query, then logits over the temperature."""
    projection, gain, anchors = parts
    return anchor_logits(routing_query(x, projection, gain, score), anchors, score)


def route(
    x: Float[Tensor, "T D"],
    parts: KernelWeights,
    score: ScoreConstants,
    *,
    top_k: int,
    normalize: bool = False,
    routes: Int[Tensor, "T K"] | None = None,
) -> Routed:
    """Run a whole anchor router: query, logits over the temperature, softmax and top-k.

    The fused forms read x once and hold no [T, N, H] tensor. ``routes``: see ``softmax_top_k``.
    """
    logits = route_logits(x, parts, score)
    return logits, *softmax_top_k(logits, top_k, normalize=normalize, routes=routes)
