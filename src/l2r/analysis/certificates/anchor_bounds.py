"""Bounds on the drift of logits from their tangents, for experts with several anchors.

With w = t(|q|) q / |q|, the logit of an expert is the convex function log sum_h exp(m_h . w).
Shape letters: B any batch (tokens or cells), N experts, H anchors per expert, R rank.
"""

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Moments:
    """Moments of every expert's anchors, under the softmax of their scores at one w.

    logits [B, N]. mean [B, N, R]: gradient of the logit in w. scatter [B, N]: trace of the
    covariance. width [B, N]: largest distance of an anchor from the mean.
    """

    logits: Tensor
    mean: Tensor
    scatter: Tensor
    width: Tensor

    @classmethod
    def at(cls, w: Float[Tensor, "B R"], anchors: Float[Tensor, "N H R"]) -> "Moments":
        """Moments at every w."""
        scores = torch.einsum("br,nhr->bnh", w, anchors)
        largest = scores.amax(dim=-1, keepdim=True)
        shares = torch.exp(scores - largest)
        total = shares.sum(dim=-1, keepdim=True)
        shares /= total
        mean = torch.einsum("bnh,nhr->bnr", shares, anchors)
        # by dimension: a sum over the last axis of [B, N, H, R] is slow where R is 2
        off = torch.zeros_like(scores)  # square of the distance to the mean
        for dimension in range(anchors.shape[-1]):
            off += (anchors[..., dimension] - mean[..., None, dimension]).square()
        logits = (largest + total.log()).squeeze(-1)
        return cls(logits, mean, (shares * off).sum(dim=-1), off.amax(dim=-1).sqrt())

    def above_tangent(self, distance: Float[Tensor, " B"]) -> Float[Tensor, "B N"]:
        """Bound of logit minus tangent within ``distance`` of w; below it the bound is 0.

        The excess is the cumulant of the anchors around their mean, E = softmax shares:
        log E exp((m_h - mean) . d), bounded by Bennett, by Hoeffding and by its range.
        """
        reached = self.width * distance[:, None]
        bennett = torch.log1p(self.scatter * distance.square()[:, None] * _bennett(reached))
        return torch.minimum(bennett, torch.minimum(reached.square() / 2, reached))


def _bennett(x: Tensor) -> Tensor:
    """(exp(x) - 1 - x) / x^2, increasing from 1/2; a little above it near 0."""
    safe = x.clamp_min(1e-3)  # below this the difference cancels, and 1/2 + x/5 is above it
    return torch.where(x < 1e-3, 0.5 + x / 5, (torch.expm1(safe) - safe) / safe.square())
