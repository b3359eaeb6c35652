r"""Dependence of a score on the size of the query: w = t(rho) u for a query q = rho u.

With m = k (dot), k / |k| (cosine) or psi(|k|) k / |k| (SIPS), the score of an anchor is m . w.
So t is rho, 1 or phi(rho_hat): all that differs between the scorings once anchors are fixed.

Each class has ``value`` t(rho), ``slope`` t'(rho), ``sizes(low, high)``, the least and largest
rho with t in [low, high], rounded outwards, and ``curvature(low, high)``, a bound of the
second derivative of q -> w along unit directions for |q| in [low, high]; norms are > 0.
``reach(rho)``: largest t up to rho, with what cancels in it; its rounding is a share of that.
"""

import dataclasses
import math

import torch
from torch import Tensor

# max |d2 tanh| = 4 / (3 sqrt 3), and the size of the angular part of the second derivative of
# t(rho) u along a unit direction (h_r, h_t): |(-k h_t^2, 2 k h_r h_t)| <= 2 / sqrt 3 * |k|.
_TANH_CURVATURE = 4 / (3 * math.sqrt(3))
_ANGULAR = 2 / math.sqrt(3)
_SLACK = 1e-12  # of sizes, above the rounding of t and of its inverse


@dataclasses.dataclass(frozen=True)
class Identity:
    """Dot product: w = q."""

    def value(self, rho: Tensor) -> Tensor:
        return rho

    def slope(self, rho: Tensor) -> Tensor:
        return torch.ones_like(rho)

    def sizes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return low * (1 - _SLACK), high * (1 + _SLACK)

    def curvature(self, low: Tensor, high: Tensor) -> Tensor:
        return torch.zeros_like(low + high)

    def reach(self, rho: Tensor) -> Tensor:
        return rho


@dataclasses.dataclass(frozen=True)
class Saturated:
    """SIPS: t = gamma (1 + beta tanh(scale rho + shift)), Eq. 9 with its norm of |q|.

    The cosine, w = u, is gamma = 1 and beta = 0.
    """

    gamma: float = 1.0
    beta: float = 1.0
    scale: float = 1.0
    shift: float = 0.0

    def value(self, rho: Tensor) -> Tensor:
        return self.gamma * (1 + self.beta * torch.tanh(self.scale * rho + self.shift))

    def slope(self, rho: Tensor) -> Tensor:
        saturation = torch.tanh(self.scale * rho + self.shift)
        return self.gamma * self.beta * self.scale * (1 - saturation.square())

    def sizes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        if self.beta * self.scale == 0:  # t is constant
            return torch.zeros_like(low), torch.full_like(high, torch.inf)
        slack = _SLACK * (1 + abs(self.shift))
        ends = [
            (torch.atanh(((value / self.gamma - 1 + room) / self.beta).clamp(-1, 1)) - self.shift)
            / self.scale
            for value, room in ((low, -slack), (high, slack))
        ]
        return torch.minimum(*ends), torch.maximum(*ends)

    def curvature(self, low: Tensor, high: Tensor) -> Tensor:
        # |w''| <= |t''| + 2 / sqrt 3 * |t - rho t'| / rho^2, along any unit direction.
        bent = self.gamma * self.beta * self.scale**2 * _TANH_CURVATURE
        defect = torch.maximum(self.value(low), self.value(high))
        if self.scale != 1 or self.shift != 0:  # else t - rho t' lies in [0, t]
            defect = defect + self.gamma * self.beta * abs(self.scale) * high
        return bent + _ANGULAR * defect / low.square()

    def reach(self, rho: Tensor) -> Tensor:
        return torch.full_like(rho, self.gamma * (1 + self.beta) * (1 + abs(self.shift)))


Radial = Identity | Saturated
