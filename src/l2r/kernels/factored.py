"""Every score as one inner product: logits[t, n] = log sum_h exp(a_t . b_nh).

``a`` depends on the query alone and ``b`` on the anchor alone, so the transforms are small
([T, R] and [N, H, R]) and one core of products, exponentials and sums serves all scorings.

Shape letters: T tokens, R rank, N experts, H anchors per expert.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from l2r.functional import phi, psi, unit
from l2r.kernels.backend import Score


def query_side(
    query: Float[Tensor, "T R"], rho_hat: Float[Tensor, " T"] | None, score: Score
) -> Float[Tensor, "T R"]:
    """a: the query (dot), its direction (cosine), or phi(rho_hat) times its direction (sips)."""
    if score.scoring == "dot":
        return query
    if score.scoring == "cosine":
        return unit(query, eps=score.eps)
    norm = torch.linalg.vector_norm(query, dim=-1)
    factor = phi(norm if rho_hat is None else rho_hat, gamma=score.gamma, beta=score.beta)
    return query * (factor / norm.clamp_min(score.eps)).unsqueeze(-1)


def anchor_side(anchors: Float[Tensor, "N H R"], score: Score) -> Float[Tensor, "N H R"]:
    """b: the anchor (dot), its direction (cosine), or psi(|k|) times its direction (sips)."""
    if score.scoring == "dot":
        return anchors
    if score.scoring == "cosine":
        return unit(anchors, eps=score.eps)
    norm = torch.linalg.vector_norm(anchors, dim=-1)
    return anchors * (psi(norm, p=score.p) / norm.clamp_min(score.eps)).unsqueeze(-1)


def query_side_backward(
    grad: Float[Tensor, "T R"],
    query: Float[Tensor, "T R"],
    rho_hat: Float[Tensor, " T"] | None,
    score: Score,
) -> tuple[Float[Tensor, "T R"], Float[Tensor, " T"] | None]:
    """Gradients of the query and of rho_hat (None without one) from that of a."""
    if score.scoring == "dot":
        return grad, None if rho_hat is None else torch.zeros_like(rho_hat)
    norm = torch.linalg.vector_norm(query, dim=-1)
    if score.scoring == "cosine":
        return _direction_backward(grad, query, norm, None, score.eps), None
    t = torch.tanh(norm if rho_hat is None else rho_hat)
    grad_factor = (grad * query).sum(dim=-1) / norm.clamp_min(score.eps)
    grad_rho = grad_factor * (1 - t.square()) * (score.gamma * score.beta)
    grad = grad * (score.gamma * (1 + score.beta * t)).unsqueeze(-1)
    if rho_hat is None:
        return _direction_backward(grad, query, norm, grad_rho, score.eps), None
    return _direction_backward(grad, query, norm, None, score.eps), grad_rho


def anchor_side_backward(
    grad: Float[Tensor, "N H R"], anchors: Float[Tensor, "N H R"], score: Score
) -> Float[Tensor, "N H R"]:
    """Gradient of the anchors from that of b."""
    if score.scoring == "dot":
        return grad
    norm = torch.linalg.vector_norm(anchors, dim=-1)
    if score.scoring == "cosine":
        return _direction_backward(grad, anchors, norm, None, score.eps)
    grad_norm = (grad * anchors).sum(dim=-1) / norm.clamp_min(score.eps) / score.p
    grad = grad * psi(norm, p=score.p).unsqueeze(-1)
    return _direction_backward(grad, anchors, norm, grad_norm, score.eps)


def _direction_backward(
    grad: Tensor, vector: Tensor, norm: Tensor, grad_norm: Tensor | None, eps: float
) -> Tensor:
    """Gradient of v from that of u = v / max(|v|, eps) and, if given, that of |v|."""
    inverse = norm.clamp_min(eps).reciprocal()
    along = (grad * vector).sum(dim=-1) * inverse.square()
    pull = torch.where(norm >= eps, along, 0.0) * -inverse  # below eps the divisor is constant
    if grad_norm is not None:
        pull = pull + torch.where(norm > 0, grad_norm / norm, 0.0)
    return grad * inverse.unsqueeze(-1) + vector * pull.unsqueeze(-1)
