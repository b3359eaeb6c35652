"""Bounds of the change of logit differences around each token (derivation: docs/diagnostics.md).

Shape letters: T tokens, D hidden size, N experts, K experts that are to stay chosen, R rank.
"""

import dataclasses

import torch
from torch import Tensor

from l2r.analysis.certificates.anchor_bounds import Moments
from l2r.analysis.certificates.routing_map import AnchorMap

EXACT = "donot_use_mm_for_euclid_dist"  # for torch.cdist, whose product of matrices is less exact


@dataclasses.dataclass(frozen=True)
class LocalBounds:
    """Bounds on the change of the logit differences around each token.

    moments: of the anchors at the token. slopes [T, K, N]: gradient norm in x of z_i - z_j, the
    logit of a chosen expert less that of any. slope_gap_w [T, K, N]: the same in w. dq_dx,
    dw_dq [T]: norms of dq/dx and dw/dq. rho, rms, size [T]: |q|, n(x) and |x|. matrix_norm: of W_q.
    max_radius [T]: no radius is certified beyond it. floor [T]: lower bound on |q|,
    below which no radius is certified.
    """

    form: AnchorMap
    moments: Moments
    slopes: Tensor
    slope_gap_w: Tensor
    dq_dx: Tensor
    dw_dq: Tensor
    rho: Tensor
    rms: Tensor
    size: Tensor
    matrix_norm: Tensor
    max_radius: Tensor
    floor: Tensor
    hidden: int

    @classmethod
    def of(cls, form: AnchorMap, x: Tensor, chosen: Tensor) -> "LocalBounds":
        """Bounds around x [T, D] for ``chosen`` [T, K], indices of experts."""
        rms, query = form.rms(x), form.query(x)
        moments = Moments.at(form.effective_query(query), form.anchors)
        rho = torch.linalg.vector_norm(query, dim=-1)
        safe = rho.clamp_min(form.least_size)
        value, slope = form.radial.value(safe), form.radial.slope(safe)
        inner = query_metric(form, x, query, rms)
        along = query[:, :, None] * query[:, None, :] / safe.square()[:, None, None]
        across = torch.eye(query.shape[1], dtype=query.dtype, device=x.device) - along
        dw_dq = slope[:, None, None] * along + (value / safe)[:, None, None] * across
        pulled = moments.mean @ (dw_dq @ inner @ dw_dq)  # [T, N, R]
        own = (pulled * moments.mean).sum(dim=2)  # [T, N]
        mean = _rows(moments.mean, chosen)  # [T, K, R]
        gram = mean @ pulled.transpose(1, 2)  # [T, K, N]
        total = own.gather(1, chosen)[:, :, None] + own[:, None, :]
        squared = (total - 2 * gram).clamp_min(0) + 1e-14 * total.abs()  # above its rounding
        dq_dx = torch.linalg.eigvalsh(inner)[:, -1].clamp_min(1e-300).sqrt() * (1 + 1e-9)
        # Farther away the query may be 0, or the input of the RMSNorm may.
        limit = x.shape[1] ** 0.5 * rms if form.norm_eps is not None else torch.inf
        return cls(
            form=form,
            moments=moments,
            slopes=squared.sqrt(),
            slope_gap_w=torch.cdist(mean, moments.mean, compute_mode=EXACT),
            dq_dx=dq_dx,
            dw_dq=torch.maximum(slope.abs(), value / safe),
            rho=rho,
            rms=rms,
            size=torch.linalg.vector_norm(x.double(), dim=-1),
            matrix_norm=torch.linalg.matrix_norm(form.matrix, 2),
            max_radius=torch.minimum(rho / dq_dx, torch.as_tensor(limit, dtype=rho.dtype)),
            floor=form.floors(x),
            hidden=x.shape[1],
        )

    def lower_bound(self, gaps: Tensor, radius: Tensor) -> Tensor:
        """Lower bound [T, K, N] of every z_i - z_j over the ball of ``radius`` [T].

        Of the logits as the router computes them: its arithmetic moves q, and every logit.
        """
        q_remainder = self._query_remainder(radius)
        moved = self.dq_dx * radius + q_remainder
        low, high = self.rho - moved, self.rho + moved
        curved = self.form.radial.curvature(low.clamp_min(1e-300), high)
        w_remainder = self.dw_dq * q_remainder + curved * moved.square() / 2
        above = self.moments.above_tangent(self.dw_dq * self.dq_dx * radius + w_remainder)
        # z_i is convex in w, so its tangent bounds it below; z_j stays near its own.
        bound = gaps - self.slopes * radius[:, None, None] - above[:, None, :]
        bound = bound - self.slope_gap_w * w_remainder[:, None, None]
        bound = bound - 2 * self.form.logit_rounding(high)[:, None, None]
        return torch.where((low > self.floor)[:, None, None], bound, -torch.inf)

    def _query_remainder(self, radius: Tensor) -> Tensor:
        """Largest distance of the computed q from the tangent of q over the ball."""
        rounding = self.form.query_rounding(self.size + radius)
        if self.form.norm_eps is None:
            return rounding
        part = radius / (self.hidden**0.5 * self.rms)
        shrunk = part / (1 - part).clamp_min(1e-300)  # bounds |n0 / n - 1|
        return rounding + shrunk * (self.matrix_norm * radius / self.rms + self.rho * part)


def _rows(values: Tensor, chosen: Tensor) -> Tensor:
    """Rows [T, K, R] of values [T, N, R]."""
    return values.gather(1, chosen[:, :, None].expand(-1, -1, values.shape[2]))


def query_metric(form: AnchorMap, x: Tensor, query: Tensor, rms: Tensor) -> Tensor:
    """dq/dx (dq/dx)^T [T, R, R]; the RMSNorm takes away part of the component along q."""
    metric = form.matrix @ form.matrix.T / rms.square()[:, None, None]
    if form.norm_eps is None:
        return metric
    share = x.double().square().mean(dim=-1) / rms.square()  # below 1 by norm_eps
    taken = (2 - share) / (x.shape[1] * rms.square())
    return metric - taken[:, None, None] * query[:, :, None] * query[:, None, :]
