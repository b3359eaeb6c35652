"""Every score as one inner product: logits[t, n] = log sum_h exp(a_t . b_nh).

``a`` depends on the query alone and ``b`` on the anchor alone, so the transforms touch [R, T] and
[R, H N] numbers and one core of products, exponentials and sums serves all scorings. Vectors are
columns here: sums over a small rank are then sums of long rows.

Shape letters: R rank, C vectors (tokens, or anchors of all experts).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from l2r.functional import phi, psi
from l2r.kernels.backend import Score


def norms(vectors: Float[Tensor, "R C"]) -> Float[Tensor, " C"]:
    """Length of every column; torch's vector_norm over a short first dimension is 10x slower."""
    return torch.square(vectors).sum(dim=0).sqrt_()


def query_side(
    query: Float[Tensor, "R C"], rho_hat: Float[Tensor, " C"] | None, score: Score
) -> Float[Tensor, "R C"]:
    """a: the query (dot), its direction (cosine), or phi(rho_hat) times its direction (sips)."""
    if score.scoring == "dot":
        return query
    norm = norms(query)
    if score.scoring == "cosine":
        return query / norm.clamp_min_(score.eps)
    factor = phi(norm if rho_hat is None else rho_hat, gamma=score.gamma, beta=score.beta)
    return query * factor.div_(norm.clamp_min_(score.eps))


def anchor_side(anchors: Float[Tensor, "R C"], score: Score) -> Float[Tensor, "R C"]:
    """b: the anchor (dot), its direction (cosine), or psi(|k|) times its direction (sips)."""
    if score.scoring == "dot":
        return anchors
    norm = norms(anchors)
    if score.scoring == "cosine":
        return anchors / norm.clamp_min_(score.eps)
    return anchors * psi(norm, p=score.p).div_(norm.clamp_min_(score.eps))


def query_side_backward(
    grad: Float[Tensor, "R C"],
    query: Float[Tensor, "R C"],
    rho_hat: Float[Tensor, " C"] | None,
    score: Score,
) -> tuple[Float[Tensor, "R C"], Float[Tensor, " C"] | None]:
    """Gradients of the query and of rho_hat (None without one) from that of a."""
    if score.scoring == "dot":
        return grad, None if rho_hat is None else torch.zeros_like(rho_hat)
    norm = norms(query)
    if score.scoring == "cosine":
        no_rho = None if rho_hat is None else torch.zeros_like(rho_hat)
        return _direction_backward(grad, query, norm, None, score.eps), no_rho
    t = torch.tanh(norm if rho_hat is None else rho_hat)
    grad_factor = (grad * query).sum(dim=0) / norm.clamp_min(score.eps)
    grad_rho = grad_factor * (1 - t.square()) * (score.gamma * score.beta)
    grad = grad * (score.gamma * (1 + score.beta * t))
    if rho_hat is None:
        return _direction_backward(grad, query, norm, grad_rho, score.eps), None
    return _direction_backward(grad, query, norm, None, score.eps), grad_rho


def anchor_side_backward(
    grad: Float[Tensor, "R C"], anchors: Float[Tensor, "R C"], score: Score
) -> Float[Tensor, "R C"]:
    """Gradient of the anchors from that of b."""
    if score.scoring == "dot":
        return grad
    norm = norms(anchors)
    if score.scoring == "cosine":
        return _direction_backward(grad, anchors, norm, None, score.eps)
    grad_norm = (grad * anchors).sum(dim=0) / norm.clamp_min(score.eps) / score.p
    grad = grad * psi(norm, p=score.p)
    return _direction_backward(grad, anchors, norm, grad_norm, score.eps)


def _direction_backward(
    grad: Tensor, vector: Tensor, norm: Tensor, grad_norm: Tensor | None, eps: float
) -> Tensor:
    """Gradient of v from that of u = v / max(|v|, eps) and, if given, that of |v|."""
    inverse = norm.clamp_min(eps).reciprocal()
    along = (grad * vector).sum(dim=0) * inverse.square()
    pull = torch.where(norm >= eps, along, 0.0) * -inverse  # below eps the divisor is constant
    if grad_norm is not None:
        pull = pull + torch.where(norm > 0, grad_norm / norm, 0.0)
    return grad * inverse + vector * pull
