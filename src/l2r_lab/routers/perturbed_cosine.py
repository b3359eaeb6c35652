"""Perturbed cosine router (Nguyen et al., ICLR 2025, arXiv 2405.14131).

z_n = W x . k_n / ((|W x| + tau_query) (|k_n| + tau_anchor)) / temperature: a cosine whose norms
are shifted by constants, which the paper shows to give polynomial estimation rates.

NOTE: constants 0.1 and 0.1 and temperature 0.3 are those of public code of the method; the
projection to N / 2 is X-MoE's.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from l2r.functional import dot_scores, magnitude, pool_anchors
from l2r.kernels import dispatch
from l2r.routers.base import Router, as_dtype, register_router
from l2r.routers.config import RouterConfig, check
from l2r.routers.holder import BareLinear


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerturbedCosineConfig(RouterConfig):
    """tau_query, tau_anchor: what is added to the norms of query and anchor.

    rank: size of the reduced space; None gives num_experts / 2, as in X-MoE.
    NOTE: the paper leaves the numbers open; public code of the method (smoe_perturbed) uses 0.1
    for both constants and a temperature of 0.3.
    """

    temperature: float = 0.3
    rank: int | None = None
    tau_query: float = 0.1
    tau_anchor: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.rank is None or self.rank >= 1, self, "rank", "None or >= 1")
        check(self.tau_query > 0, self, "tau_query", "> 0; a cosine without it is xmoe")
        check(self.tau_anchor > 0, self, "tau_anchor", "> 0; a cosine without it is xmoe")


@register_router("perturbed_cosine")
class PerturbedCosineRouter(Router):
    """Parameters: ``projection.weight`` [R, D] and ``anchors`` [N, 1, R]."""

    Config = PerturbedCosineConfig
    holders = ("projection",)

    def __init__(self, config: PerturbedCosineConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        rank = config.rank or max(1, self.num_experts // 2)
        self.projection = BareLinear(self.hidden_size, rank)
        self.anchors = nn.Parameter(torch.empty(self.num_experts, 1, rank))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Projection as nn.Linear; anchors orthogonal with gain 0.32, as X-MoE."""
        super().reset_parameters()
        self.projection.reset_parameters()
        if not self.anchors.is_meta:
            nn.init.orthogonal_(self.anchors[:, 0], gain=0.32)

    def query(self, x: Tensor) -> Tensor:
        x, dtype = self._prepare(x), self.compute_dtype(x)
        return dispatch.routing_query(x, as_dtype(self.projection.weight, dtype))

    def raw_logits(self, x: Tensor) -> Tensor:
        query = self.query(x)
        anchors = self.anchors.to(query.dtype)
        shifted = (magnitude(query) + self.config.tau_query).unsqueeze(-1)
        sizes = torch.linalg.vector_norm(anchors, dim=-1, keepdim=True) + self.config.tau_anchor
        return pool_anchors(dot_scores(query / shifted, anchors / sizes))
