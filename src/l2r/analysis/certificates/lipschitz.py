r"""Gradients and Lipschitz bounds of SIPS (paper, Appendix C), and sharper exact ones.

For a score z = phi(rho) psi(kappa) c with rho = |q|, kappa = |k| and c their cosine. The query
norm enters phi as scale * rho + shift: 1 and 0 without BatchNorm of |q|.

Shape letters: B any batch, R rank.
"""

import dataclasses

import torch
from jaxtyping import Float
from torch import Tensor

from l2r.analysis.certificates.query_magnitude import Saturated
from l2r.errors import InputError
from l2r.functional import psi
from l2r.functional.scoring import unit


@dataclasses.dataclass(frozen=True)
class Sips(Saturated):
    """Constants of phi and psi (Eq. 9 and 11): ``value`` is phi, ``slope`` its derivative."""

    p: float = 4.0

    def psi(self, kappa: Float[Tensor, "*B"]) -> Float[Tensor, "*B"]:
        """psi, Eq. 11; its slope is 1 / p."""
        return psi(kappa, p=self.p)


def cosine_gradient(
    query: Float[Tensor, "*B R"], anchor: Float[Tensor, "*B R"]
) -> Float[Tensor, "*B R"]:
    """Gradient of the cosine in q, Eq. 17: (I - u u^T) v / rho. Swap arguments for k, Eq. 18."""
    rho, u, v = _norm(query), unit(query), unit(anchor)
    return (v - _dot(u, v)[..., None] * u) / rho[..., None]


def query_gradient(
    query: Float[Tensor, "*B R"], anchor: Float[Tensor, "*B R"], sips: Sips
) -> Float[Tensor, "*B R"]:
    """Gradient of the score in q, Eq. 19."""
    rho, kappa, u = _norm(query), _norm(anchor), unit(query)
    radial = (sips.slope(rho) * _dot(u, unit(anchor)))[..., None] * u
    angular = sips.value(rho)[..., None] * cosine_gradient(query, anchor)
    return sips.psi(kappa)[..., None] * (radial + angular)


def anchor_gradient(
    query: Float[Tensor, "*B R"], anchor: Float[Tensor, "*B R"], sips: Sips
) -> Float[Tensor, "*B R"]:
    """Gradient of the score in k, Eq. 20."""
    rho, kappa, v = _norm(query), _norm(anchor), unit(anchor)
    radial = (_dot(unit(query), v) / sips.p)[..., None] * v
    angular = sips.psi(kappa)[..., None] * cosine_gradient(anchor, query)
    return sips.value(rho)[..., None] * (radial + angular)


def query_bound(
    rho: Float[Tensor, "*#B"], kappa: Float[Tensor, "*#B"], sips: Sips
) -> Float[Tensor, "*#B"]:
    """Paper's bound of the gradient in q, Eq. 21: psi (|phi'| + phi / rho)."""
    return sips.psi(kappa).abs() * (sips.slope(rho).abs() + sips.value(rho) / rho)


def anchor_bound(
    rho: Float[Tensor, "*#B"], kappa: Float[Tensor, "*#B"], sips: Sips
) -> Float[Tensor, "*#B"]:
    """Paper's bound of the gradient in k, Eq. 22: phi (|psi'| + psi / kappa)."""
    return sips.value(rho) * (1 / sips.p + sips.psi(kappa).abs() / kappa)


def sharp_query_bound(
    rho: Float[Tensor, "*#B"], kappa: Float[Tensor, "*#B"], sips: Sips
) -> Float[Tensor, "*#B"]:
    """Largest gradient norm in q over all directions: psi max(|phi'|, phi / rho).

    The two parts of Eq. 19 are at right angles, which Eq. 21 does not use. Reached at cosine 1
    or 0; between 1 and 1/2 of Eq. 21.
    """
    return sips.psi(kappa).abs() * torch.maximum(sips.slope(rho).abs(), sips.value(rho) / rho)


def sharp_anchor_bound(
    rho: Float[Tensor, "*#B"], kappa: Float[Tensor, "*#B"], sips: Sips
) -> Float[Tensor, "*#B"]:
    """Largest gradient norm in k over all directions: phi max(1 / p, psi / kappa)."""
    return sips.value(rho) * (sips.psi(kappa).abs() / kappa).clamp_min(1 / sips.p)


@dataclasses.dataclass(frozen=True)
class Domain:
    """Sizes of queries and anchors that a constant holds for, Eq. 23."""

    least_query: float
    least_anchor: float
    most_anchor: float

    def __post_init__(self) -> None:
        if self.least_query <= 0 or not 0 < self.least_anchor <= self.most_anchor:
            raise InputError(
                f"a domain needs least_query > 0 and 0 < least_anchor <= most_anchor; got {self}"
            )


def domain_constants(domain: Domain, sips: Sips) -> dict[str, float]:
    """Lipschitz constants on a domain: the paper's (Eq. 24 and 25) and the smallest ones.

    query, anchor: psi_max (L_phi + phi_max / eps_q) and phi_max (L_psi + psi_max / eps_k).
    sharp_query, sharp_anchor: the suprema of the gradient norms themselves; for sharp_query
    without BatchNorm of |q| (scale 1, shift 0), else its query value.
    """
    phi_max = sips.gamma * (1 + sips.beta)
    psi_max = 1 + (domain.most_anchor - 1) / sips.p
    slope = sips.gamma * sips.beta * abs(sips.scale)
    query = psi_max * (slope + phi_max / domain.least_query)
    sharp = query
    if sips.scale == 1 and sips.shift == 0:
        # phi / rho and phi' both fall with rho, so the smallest query is the worst.
        sizes = [[domain.least_query], [domain.most_anchor]]
        rho, kappa = torch.tensor(sizes, dtype=torch.float64)
        sharp = sharp_query_bound(rho, kappa, sips).item()
    # psi / kappa = 1 / p + (1 - 1 / p) / kappa falls with kappa, and is never below 1 / p.
    least = domain.least_anchor
    return {
        "query": query,
        "anchor": phi_max * (1 / sips.p + psi_max / least),
        "sharp_query": sharp,
        "sharp_anchor": phi_max * (1 / sips.p + (1 - 1 / sips.p) / least),
    }


def _norm(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(dim=-1)
