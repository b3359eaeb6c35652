"""Float64 form of a router, from which a certificate can be derived.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert.
"""

import dataclasses
import functools

import torch
from jaxtyping import Float
from torch import Tensor, nn

from l2r.analysis.certificates.query_magnitude import Identity, Radial, Saturated
from l2r.functional import psi, unit
from l2r.kernels.contract import Scoring
from l2r.routers import LinearSipsRouter, XMoERouter
from l2r.routers.anchor_router import AnchorRouter
from l2r.routers.l2r import L2RRouter


@dataclasses.dataclass(frozen=True)
class LinearMap:
    """A router whose order of experts is that of weight x + bias, [N, D] and [N].

    So is every router here with one anchor per expert: cosine and SIPS multiply the scores
    m_i . W_q x of a token by one positive number (phi(|q|) / |q|), and so does RMSNorm.
    """

    weight: Float[Tensor, "N D"]
    bias: Float[Tensor, " N"]

    @property
    def num_experts(self) -> int:
        """N."""
        return len(self.weight)

    def logits(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T N"]:
        """Scores in the order of the router's logits."""
        return x.double() @ self.weight.T + self.bias


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
        """The router's logits, before its temperature."""
        return torch.logsumexp(self.scores(self.query(x)), dim=-1)


RoutingMap = LinearMap | AnchorMap


@functools.singledispatch
def routing_map(router: nn.Module) -> RoutingMap:
    """Float64 form of a router; other classes join with ``@routing_map.register``.

    Others, Hugging Face's too, are taken as linear in their ``weight`` [N, D]; ``certify`` compares
    the decisions of the form with those of the router before it uses it.
    Raises ValueError for a module without such a weight.
    """
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(f"no routing map is known for {type(router).__name__}")
    bias = getattr(router, "bias", None)
    return _linear(_wide(weight), None if bias is None else _wide(bias))


@routing_map.register
def _(router: XMoERouter) -> RoutingMap:
    units = unit(_wide(router.anchors[:, 0]), eps=router.config.eps)
    bias = router.projection.bias
    offset = None if bias is None else units @ _wide(bias)
    return _linear(units @ _wide(router.projection.weight), offset)


@routing_map.register
def _(router: LinearSipsRouter) -> RoutingMap:
    anchors = scoring_anchors(router)[:, 0]
    return _linear(anchors if router.norm is None else anchors * _wide(router.norm.weight))


@routing_map.register
def _(router: L2RRouter) -> RoutingMap:
    matrix = _wide(router.projection.weight)
    if router.norm is not None:
        matrix = matrix * _wide(router.norm.weight)
    anchors = scoring_anchors(router)
    if anchors.shape[1] == 1:
        return _linear(anchors[:, 0] @ matrix)
    config = router.config
    eps, dropped = None if router.norm is None else config.norm_eps, None
    if config.scoring == "cosine":
        eps, dropped = None, eps
    return AnchorMap(matrix, anchors, radial_of(router), eps, config.eps, dropped)


def scoring_anchors(router: AnchorRouter) -> Float[Tensor, "N H R"]:
    """The m of every anchor: k, k / |k| or psi(|k|) k / |k|, by the router's scoring."""
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


def _linear(weight: Tensor, bias: Tensor | None = None) -> LinearMap:
    return LinearMap(weight, weight.new_zeros(len(weight)) if bias is None else bias)


def _wide(parameter: Tensor) -> Tensor:
    return parameter.detach().double()
