"""The unfused path: compositions of l2r.functional that every fused kernel must equal.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
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
    return x.to(weight.dtype) @ weight.T


def routing_query(
    x: Float[Tensor, "T D"],
    projection: Float[Tensor, "R D"],
    gain: Float[Tensor, " D"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "T R"]:
    """Query of the router input, Eq. 6; RMS-normalised with ``gain`` first when it is given.

    Computed in the dtype of the parameters, whatever that of x.
    """
    x = x.to(projection.dtype)
    return low_rank_query(x if gain is None else rms_norm(x, gain, eps=eps), projection)


def anchor_logits(
    query: Float[Tensor, "T R"],
    anchors: Float[Tensor, "N H R"],
    *,
    scoring: Scoring,
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


class Routed(NamedTuple):
    """Result of ``route``: logits [T, N], weights and indices [T, K]; by-products if asked for.

    lse [T]: log-sum-exp of the logits over experts, fp32 or better. sums [2, N]: over tokens,
    the sum of the routing probabilities and the number of choices of each expert.
    """

    logits: Float[Tensor, "T N"]
    weights: Float[Tensor, "T K"]
    indices: Int[Tensor, "T K"]
    lse: Float[Tensor, " T"] | None
    sums: Float[Tensor, "2 N"] | None

    def z_loss(self) -> Float[Tensor, ""]:
        """Router z-loss, Eq. 35, from ``lse``; equals ``functional.router_z_loss``.

        Raises ValueError if the by-products were not asked for.
        """
        if self.lse is None:
            raise ValueError("sums must be True in route(...) for this loss; got sums=False")
        return self.lse.square().sum() / max(1, self.lse.shape[0])

    def load_balancing_loss(self) -> Float[Tensor, ""]:
        """Eq. 34 from ``sums``; equals ``functional.load_balancing_loss``.

        Raises ValueError if the sums were not asked for.
        """
        if self.sums is None:
            raise ValueError("sums must be True in route(...) for this loss; got sums=False")
        share, used = self.sums / max(1, self.logits.shape[0])
        return self.sums.shape[1] * (share @ used.detach())


def route(
    x: Float[Tensor, "T D"],
    projection: Float[Tensor, "R D"],
    gain: Float[Tensor, " D"] | None,
    anchors: Float[Tensor, "N H R"],
    *,
    scoring: Scoring,
    top_k: int,
    norm_eps: float = 1e-5,
    gamma: float = 1.0,
    beta: float = 1.0,
    p: float = 4.0,
    eps: float = 1e-6,
    temperature: float = 1.0,
    normalize: bool = False,
    sums: bool = False,
) -> Routed:
    """A whole anchor router: query, logits over the temperature, softmax and top-k.

    The fused forms read x once and hold no [T, N, H] tensor. ``sums`` asks for the by-products
    of the load-balancing loss.
    """
    query = routing_query(x, projection, gain, eps=norm_eps)
    logits = anchor_logits(query, anchors, scoring=scoring, gamma=gamma, beta=beta, p=p, eps=eps)
    logits = logits if temperature == 1.0 else logits / temperature
    weights, indices = softmax_top_k(logits, top_k, normalize=normalize)
    if not sums:
        return Routed(logits, weights, indices, None, None)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    used = torch.zeros_like(wide).scatter_(1, indices, 1.0).sum(0)
    totals = torch.stack([routing_probs(logits).sum(0), used])
    return Routed(logits, weights, indices, torch.logsumexp(wide, dim=1), totals)
