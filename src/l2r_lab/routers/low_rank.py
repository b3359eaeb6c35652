"""Low-rank linear router, z = U V x: two matrices, no norm, no geometry.

The plainest rival of L2R at equal parameters: what a small query space gives by itself.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.functional.scoring import ScoreConstants
from l2r.kernels import dispatch
from l2r.kernels.plain import KernelWeights
from l2r.routers.base import Router, as_dtype, register_router, truncated_normal
from l2r.routers.config import RouterConfig, check
from l2r.routers.holder import BareLinear


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRankConfig(RouterConfig):
    """rank: rows of V.

    Both matrices start so that inputs of unit variance give logits of unit variance, at any
    hidden_size and rank; ``temperature`` sets another scale.
    """

    rank: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.rank >= 1, self, "rank", ">= 1")


@register_router("low_rank")
class LowRankRouter(Router):
    """Parameters: ``projection.weight`` [R, D], which is V, and ``anchors`` [N, 1, R], U."""

    Config = LowRankConfig
    holders = ("projection",)

    def __init__(self, config: LowRankConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        if config.rank > self.hidden_size:
            raise InputError(
                f"rank must be <= hidden_size; got rank={config.rank}, "
                f"hidden_size={self.hidden_size}; lower rank"
            )
        self.score = ScoreConstants("dot", scale=1 / config.temperature)
        self.projection = BareLinear(self.hidden_size, config.rank)
        self.anchors = nn.Parameter(torch.empty(self.num_experts, 1, config.rank))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        truncated_normal(self.projection.weight, self.hidden_size**-0.5)
        truncated_normal(self.anchors, self.config.rank**-0.5)

    def query(self, x: Tensor) -> Tensor:
        x, dtype = self._prepare(x), self.compute_dtype(x)
        return dispatch.routing_query(x, as_dtype(self.projection.weight, dtype))

    def kernel_weights(self, x: Tensor) -> KernelWeights | None:
        """None where a learned temperature follows the logits."""
        if self.log_temperature is not None:
            return None
        dtype = self.compute_dtype(x)
        return as_dtype(self.projection.weight, dtype), None, as_dtype(self.anchors, dtype)

    def raw_logits(self, x: Tensor) -> Tensor:
        query = self.query(x)
        score = self.score._replace(scale=1.0)
        return dispatch.anchor_logits(query, self.anchors.to(query.dtype), score)
