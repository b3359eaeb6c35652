"""Base of the routers with anchors: the score's fields, the query norm and the anchors."""

import dataclasses
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from l2r.functional import magnitude, unit
from l2r.kernels import dispatch
from l2r.kernels.contract import DEFAULTS, ScoreConstants, Scoring
from l2r.routers.base import Router, as_dtype
from l2r.routers.config import RouterConfig, check
from l2r.routers.holder import parameter
from l2r.routers.norms import InputNormGain, MagnitudeBatchNorm
from l2r.routers.spread import even_anchors

QueryNorm = Literal["rmsnorm", "batchnorm", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnchorConfig(RouterConfig):
    """Fields of the score (paper, Eq. 8 to 11) and of the query norm.

    scoring: dot, cosine or sips. gamma, beta, p: constants of phi and psi.
    query_norm: rmsnorm of the router input (language), batchnorm of |q| (vision), or none.
    anchor_init: initial anchors drawn on the unit sphere, or spread evenly over it (spread.py).
    """

    read_with: ClassVar = {
        **{name: {"scoring": ("sips",)} for name in ("gamma", "beta", "p")},
        "eps": {"scoring": ("cosine", "sips")},
        "norm_eps": {"query_norm": ("rmsnorm", "batchnorm")},
    }

    scoring: Scoring = "sips"
    query_norm: QueryNorm = "rmsnorm"
    anchor_init: Literal["drawn", "even"] = "drawn"
    gamma: float = DEFAULTS.gamma
    beta: float = DEFAULTS.beta
    p: float = DEFAULTS.p
    norm_eps: float = DEFAULTS.norm_eps
    eps: float = DEFAULTS.eps

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.gamma > 0, self, "gamma", "> 0")
        check(0 <= self.beta <= 1, self, "beta", "between 0 and 1")
        check(self.p >= 1, self, "p", ">= 1, so that psi is not negative")
        check(self.norm_eps > 0, self, "norm_eps", "> 0")
        check(self.eps > 0, self, "eps", "> 0")


class AnchorRouter(Router):
    """Base class of routers with anchors: query norm, anchors [N, H, R], scoring."""

    anchors: nn.Parameter

    def __init__(self, config: AnchorConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        c, scale = config, 1 / config.temperature
        self.score = ScoreConstants(c.scoring, c.gamma, c.beta, c.p, c.eps, scale, c.norm_eps)
        self.norm = InputNormGain(self.hidden_size) if config.query_norm == "rmsnorm" else None
        # Dot and cosine never read |q|: a norm of it would hold parameters without a gradient.
        scales = config.query_norm == "batchnorm" and config.scoring == "sips"
        self.magnitude_norm = MagnitudeBatchNorm(eps=config.norm_eps) if scales else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Anchors on the unit sphere (paper, Section 3.4), so that psi starts at 1."""
        super().reset_parameters()
        if self.config.anchor_init == "drawn":
            self.anchors.copy_(unit(nn.init.normal_(torch.empty_like(self.anchors))))
        elif not self.anchors.is_meta:
            self.anchors.copy_(even_anchors(*self.anchors.shape))
        if self.norm is not None:
            self.norm.weight.fill_(1)
        if self.magnitude_norm is not None:
            self.magnitude_norm.reset_parameters()

    def gain(self, dtype: torch.dtype) -> Tensor | None:
        """Gain of the input's RMSNorm, or None where the query norm is another."""
        norm = self._modules.get("norm")
        return None if norm is None else as_dtype(parameter(norm, "weight"), dtype)

    def raw_logits(self, x: Tensor) -> Tensor:
        query = self.query(x)
        rho_hat = None if self.magnitude_norm is None else self.magnitude_norm(magnitude(query))
        score = self.score._replace(scale=1.0)
        return dispatch.anchor_logits(query, self.anchors.to(query.dtype), score, rho_hat)
