"""The unfused path: compositions of l2r.functional that every fused kernel must equal.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert.
"""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from l2r.functional import (
    cosine_scores,
    dot_scores,
    low_rank_query,
    pool_anchors,
    rms_norm,
    routing_probs,
    select_experts,
    sips_scores,
)

Scoring = Literal["dot", "cosine", "sips"]

_SCORES: dict[str, Callable[..., Tensor]] = {
    "dot": lambda query, anchors, **_: dot_scores(query, anchors),
    "cosine": lambda query, anchors, *, eps, **_: cosine_scores(query, anchors, eps=eps),
    "sips": sips_scores,
}


def linear_logits(x: Float[Tensor, "T D"], weight: Float[Tensor, "N D"]) -> Float[Tensor, "T N"]:
    """Linear router, Eq. 4: z = x W_g, with W_g stored as its transpose."""
    return x @ weight.T


def routing_query(
    x: Float[Tensor, "T D"],
    projection: Float[Tensor, "R D"],
    gain: Float[Tensor, " D"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "T R"]:
    """Query of the router input, Eq. 6; RMS-normalised with ``gain`` first when it is given."""
    return low_rank_query(x if gain is None else rms_norm(x, gain, eps=eps), projection)


def anchor_logits(
    query: Float[Tensor, "T R"],
    anchors: Float[Tensor, "N H R"],
    *,
    scoring: Scoring | str,
    gamma: float = 1.0,
    beta: float = 1.0,
    p: float = 4.0,
    rho_hat: Float[Tensor, " T"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "T N"]:
    """Score every anchor and pool the anchors of an expert, Eq. 7 or 12, then 13."""
    score = _SCORES[scoring]
    options = {"gamma": gamma, "beta": beta, "p": p, "rho_hat": rho_hat, "eps": eps}
    return pool_anchors(score(query, anchors, **options))


def softmax_top_k(
    logits: Float[Tensor, "T N"], top_k: int, *, normalize: bool = False
) -> tuple[Float[Tensor, "T K"], Tensor]:
    """Softmax over experts and the k largest, Eq. 2 and 3."""
    return select_experts(routing_probs(logits), top_k, normalize=normalize)
