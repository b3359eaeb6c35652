"""Float64 form of a router, from which a certificate can be derived.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert.
"""

import dataclasses
import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from l2r.analysis.certificates.arithmetic import IDEAL, STEPS, Arithmetic, family_of
from l2r.analysis.certificates.query_magnitude import Identity, Radial, Saturated
from l2r.errors import InputError
from l2r.functional import psi, unit
from l2r.functional.scoring import Scoring
from l2r.hf.models import whole_matrix
from l2r.routers import LinearSipsRouter, XMoERouter
from l2r.routers.l2r import AnchorRouter, L2RRouter

_SATURATED = 8.0  # from here on 1 + tanh(-x) in float32 may be 0
_EXP = 8  # roundings of a probability besides those of its logit


@dataclasses.dataclass(frozen=True)
class QuerySizes:
    """Range of |q|, q = matrix x, or x itself where there is no matrix [R, D]."""

    matrix: Tensor | None
    low: float = -math.inf
    high: float = math.inf

    def room(self, x: Float[Tensor, "T D"]) -> Float[Tensor, " T"]:
        """Radius around each x in which |q| stays inside; below 0 where it is not."""
        wide = x.double()
        query = wide if self.matrix is None else wide @ self.matrix.T
        rho = torch.linalg.vector_norm(query, dim=-1)
        length = 1.0 if self.matrix is None else torch.linalg.matrix_norm(self.matrix, ord=2)
        return torch.minimum(self.high - rho, rho - self.low) / length


@dataclasses.dataclass(frozen=True)
class LinearMap:
    """A router whose order of experts is that of weight x + bias, [N, D] and [N].

    So is every router here with one anchor per expert: cosine and SIPS multiply the scores
    m_i . W_q x of a token by one positive number (phi(|q|) / |q|), and so does RMSNorm. ``sizes``:
    those of a query at which that number does not round to 0.
    reach, bias_reach: what weight and bias are where all that the router adds up to them is
    positive; no rounding of its sums is larger than steps * unit * (reach |x| + bias_reach).
    """

    weight: Float[Tensor, "N D"]
    bias: Float[Tensor, " N"]
    reach: Float[Tensor, "N D"]
    bias_reach: Float[Tensor, " N"]
    steps: int
    arithmetic: Arithmetic = IDEAL
    sizes: QuerySizes | None = None

    @property
    def num_experts(self) -> int:
        """N."""
        return len(self.weight)

    def logits(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T N"]:
        """Scores in the order of the router's logits."""
        return x.double() @ self.weight.T + self.bias

    def logit_rounding(
        self, x: Float[Tensor, "T D"], logits: Float[Tensor, "T N"]
    ) -> Float[Tensor, "T N"]:
        """Bound on how far the router's own arithmetic puts each logit from that of the form.

        exp(z - max z), where probabilities rank experts, is taken of a rounded difference.
        """
        how, sums = self.arithmetic, self.sum_unit
        sizes = logits.abs()
        rounding = sums * (x.double().abs() @ self.reach.T + self.bias_reach)
        rounding = rounding + how.logits * sizes + how.least
        return rounding + how.probabilities * (_EXP + 2 * sizes.amax(dim=1, keepdim=True))

    def rounding_growth(self) -> Float[Tensor, " N"]:
        """Growth of ``logit_rounding`` for each unit of a change of x."""
        length = torch.linalg.vector_norm(self.weight, dim=1)
        growth = self.sum_unit * torch.linalg.vector_norm(self.reach, dim=1)
        how = self.arithmetic
        return growth + how.logits * length + how.probabilities * 2 * length.max()

    @property
    def sum_unit(self) -> float:
        """Rounding of a sum, relative to the sum of what it adds."""
        return self.steps * self.arithmetic.sums * (1 + self.arithmetic.logits)


@dataclasses.dataclass(frozen=True)
class AnchorMap:
    """z_i = logsumexp_h m_ih . w with w = t(|q|) q / |q| and q = matrix x / n(x).

    matrix [R, D] is W_q with the gain of the RMSNorm folded in; anchors [N, H, R] are the m.
    n is the root mean square of x where norm_eps is given, else 1. floor: smallest |q| for
    which the form holds (the router clamps smaller ones). dropped_eps: norm_eps of an
    RMSNorm that a cosine does not depend on; n is then 1, and the floor of |q| is multiplied by
    the root mean square of x.
    """

    matrix: Float[Tensor, "R D"]
    anchors: Float[Tensor, "N H R"]
    radial: Radial
    norm_eps: float | None
    floor: float
    dropped_eps: float | None = None
    arithmetic: Arithmetic = IDEAL

    @property
    def least_size(self) -> float:
        """Lower clamp of |q|: the floor, or 1e-300 where the floor depends on the token."""
        return self.floor if self.dropped_eps is None else 1e-300

    def floors(self, x: Float[Tensor, "T D"]) -> Float[Tensor, " T"]:
        """Bounds [T] on |q| above which the form holds, for every input at most |x| away."""
        n = self.rms(x)
        if self.dropped_eps is not None:
            n = (x.double().square().mean(dim=-1) + self.dropped_eps).sqrt()
        return self.floor * (1 + 2 * n)

    @property
    def num_experts(self) -> int:
        """N."""
        return len(self.anchors)

    def rms(self, x: Float[Tensor, "T D"]) -> Float[Tensor, " T"]:
        """n(x)."""
        if self.norm_eps is None:
            return torch.ones(len(x), dtype=torch.float64, device=x.device)
        return (x.double().square().mean(dim=-1) + self.norm_eps).sqrt()

    def query(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T R"]:
        """q."""
        return x.double() @ self.matrix.T / self.rms(x)[:, None]

    def effective_query(self, query: Float[Tensor, "T R"]) -> Float[Tensor, "T R"]:
        """w."""
        rho = torch.linalg.vector_norm(query, dim=-1, keepdim=True).clamp_min(self.least_size)
        return self.radial.value(rho) * query / rho

    def scores(self, query: Float[Tensor, "T R"]) -> Float[Tensor, "T N H"]:
        """m . w for every anchor."""
        return torch.einsum("tr,nhr->tnh", self.effective_query(query), self.anchors)

    def logits(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T N"]:
        """Logits of the router, before its temperature."""
        return torch.logsumexp(self.scores(self.query(x)), dim=-1)

    def query_rounding(self, size: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Bound on how far the router's own arithmetic puts q from its place, where |x| = size."""
        hidden = self.matrix.shape[1]
        reach = size if self.norm_eps is None else torch.full_like(size, hidden**0.5)  # of x / n
        unit = (2 * hidden + STEPS) * self.arithmetic.sums  # the norm is a sum of D squares, too
        return unit * torch.linalg.matrix_norm(self.matrix) * reach

    def logit_rounding(self, rho: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Bound on the rounding of a logit behind a query of norm ``rho`` at most."""
        _, heads, rank = self.anchors.shape
        longest = torch.linalg.vector_norm(self.anchors, dim=-1).max()
        scores = (2 * rank + STEPS) * longest * self.radial.reach(rho)
        return self.arithmetic.sums * (scores + heads + STEPS)


RoutingMap = LinearMap | AnchorMap


@functools.singledispatch
def routing_map(router: nn.Module) -> RoutingMap:
    """Float64 form of a router; other classes join with ``@routing_map.register``.

    Others are taken as linear in their ``weight`` [N, D], a family of Hugging Face's in its own;
    ``certify`` compares the decisions of the form with those of the router before it uses it.
    Raises ValueError for a module without such a weight.
    """
    family = family_of(router)
    weight = whole_matrix(router, family.weight) if family else getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise InputError(f"no routing map is known for {type(router).__name__}")
    bias = getattr(router, "bias", None)
    return _linear(_wide(weight), None if bias is None else _wide(bias))


@routing_map.register
def _(router: XMoERouter) -> RoutingMap:
    units = unit(_wide(router.anchors[:, 0]), eps=router.config.eps)
    bias = router.projection.bias
    return _linear(_wide(router.projection.weight), None if bias is None else _wide(bias), units)


@routing_map.register
def _(router: LinearSipsRouter) -> RoutingMap:
    anchors = scoring_anchors(router)[:, 0]  # whose own norms are sums of D squares
    weight = anchors if router.norm is None else anchors * _wide(router.norm.weight)
    steps, sizes = 2 * router.hidden_size + STEPS, sizes_with_order(router, None)
    return dataclasses.replace(_linear(weight), steps=steps, sizes=sizes)


@routing_map.register
def _(router: L2RRouter) -> RoutingMap:
    matrix = _wide(router.projection.weight)
    if router.norm is not None:
        matrix = matrix * _wide(router.norm.weight)
    anchors = scoring_anchors(router)
    if anchors.shape[1] == 1:
        form = _linear(matrix, rows=anchors[:, 0])
        return dataclasses.replace(form, sizes=sizes_with_order(router, matrix))
    config = router.config
    eps, dropped = None if router.norm is None else config.norm_eps, None
    if config.scoring == "cosine":
        eps, dropped = None, eps
    return AnchorMap(matrix, anchors, radial_of(router), eps, config.eps, dropped)


def scoring_anchors(router: AnchorRouter) -> Float[Tensor, "N H R"]:
    """Return the m of every anchor: k, k / |k| or psi(|k|) k / |k|, by the router's scoring."""
    anchors, config = _wide(router.anchors), router.config
    units = unit(anchors, eps=config.eps)
    size = psi(torch.linalg.vector_norm(anchors, dim=-1, keepdim=True), p=config.p)
    forms: dict[Scoring, Tensor] = {"dot": anchors, "cosine": units, "sips": size * units}
    return forms[config.scoring]


def radial_of(router: AnchorRouter) -> Radial:
    """t of a router; BatchNorm of |q| enters with its running statistics."""
    config, norm = router.config, router.magnitude_norm
    scale, shift = 1.0, 0.0
    if norm is not None:
        scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).item()
        shift = (norm.bias - norm.running_mean * scale).item()
    forms: dict[Scoring, Radial] = {
        "dot": Identity(),
        "cosine": Saturated(beta=0.0),
        "sips": Saturated(config.gamma, config.beta, scale, shift),
    }
    return forms[config.scoring]


def sizes_with_order(router: AnchorRouter, matrix: Tensor | None) -> QuerySizes | None:
    """Sizes of a query at which phi does not round to 0, all logits being equal then; None: all.

    BatchNorm of |q| alone makes others possible. ``matrix`` as in ``QuerySizes``.
    """
    radial = radial_of(router)
    if not isinstance(radial, Saturated) or radial.beta < 1:
        return None
    edge = -(_SATURATED + radial.shift)  # of scale times |q|
    if radial.scale < 0:
        return QuerySizes(matrix, high=edge / radial.scale)
    return QuerySizes(matrix, low=edge / radial.scale) if edge > 0 and radial.scale else None


def _linear(weight: Tensor, bias: Tensor | None = None, rows: Tensor | None = None) -> LinearMap:
    """Return the form of weight x + bias, or of rows (weight x + bias) if rows [N, R] are given."""
    bias = weight.new_zeros(len(weight)) if bias is None else bias
    steps = weight.shape[1] + STEPS
    if rows is None:
        return LinearMap(weight, bias, weight.abs(), bias.abs(), steps)
    weights, biases = ((rows @ part, rows.abs() @ part.abs()) for part in (weight, bias))
    return LinearMap(weights[0], biases[0], weights[1], biases[1], steps + 2 * rows.shape[1])


def _wide(parameter: Tensor) -> Tensor:
    return parameter.detach().double()
