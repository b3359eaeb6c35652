"""Bounds of the logit differences of a linear form, as the router computes them.

Shape letters: T tokens, D hidden size, N experts, K experts that are to stay chosen.
"""

import dataclasses

import torch
from jaxtyping import Float, Int
from torch import Tensor

from l2r.analysis.certificates.local_bounds import EXACT
from l2r.analysis.certificates.routing_map import LinearMap

_UNDERFLOW = 80.0  # nats below the best logit at which a probability in float32 is surely above 0


@dataclasses.dataclass(frozen=True)
class LinearBounds:
    """Bounds on the change of the computed z_i - z_j, a chosen expert's logit less any's.

    rounding [T, K, N]: of both logits at the token. slopes [T, K, N]: |w_i - w_j|, and what the
    rounding grows by. max_radius [T]: no radius is certified beyond it.
    """

    rounding: Tensor
    slopes: Tensor
    max_radius: Tensor

    @classmethod
    def of(
        cls,
        form: LinearMap,
        x: Float[Tensor, "T D"],
        logits: Float[Tensor, "T N"],
        chosen: Int[Tensor, "T K"],
    ) -> "LinearBounds":
        """Bounds around x, whose logits in exact arithmetic are given."""
        how, rounding = form.arithmetic, form.logit_rounding(x, logits)
        growth = form.rounding_growth()
        apart = torch.cdist(form.weight, form.weight, compute_mode=EXACT)
        slopes = apart + growth[:, None] + growth[None, :]
        length = torch.linalg.vector_norm(form.weight, dim=1)
        limit = (how.largest - logits.abs()) / length.clamp_min(1e-300)
        if how.probabilities and chosen.shape[1] > 1:
            above = logits.amax(dim=1, keepdim=True) - logits.gather(1, chosen)
            room = (_UNDERFLOW - above) / apart.max().clamp_min(1e-300)
            limit = torch.cat([limit, room], dim=1)
        if form.sizes is not None:
            limit = torch.cat([limit, form.sizes.room(x)[:, None]], dim=1)
        both = rounding.gather(1, chosen)[:, :, None] + rounding[:, None, :]
        return cls(both, slopes[chosen], limit.amin(dim=1).clamp_min(0))

    def lower_bound(
        self, gaps: Float[Tensor, "T K N"], radius: Float[Tensor, " T"]
    ) -> Float[Tensor, "T K N"]:
        """Lower bound of every computed z_i - z_j over the ball of ``radius``."""
        return gaps - self.rounding - self.slopes * radius[:, None, None]

    def radii(self, gaps: Float[Tensor, "T K N"]) -> Float[Tensor, "T K N"]:
        """Largest radius at which each of these bounds is not negative."""
        room = (gaps - self.rounding).clamp_min(0)
        # Rows that are equal never change order without rounding; their gap is constant.
        constant = torch.where(room > 0, torch.inf, 0.0)
        return torch.where(self.slopes > 0, room / self.slopes.clamp_min(1e-300), constant)
