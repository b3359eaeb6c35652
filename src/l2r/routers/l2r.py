"""L2R, the paper's router: low-rank query, bounded scores, several anchors per expert."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.kernels import dispatch
from l2r.kernels.plain import KernelWeights
from l2r.routers.anchor_router import AnchorConfig, AnchorRouter
from l2r.routers.bare_linear import BareLinear
from l2r.routers.base import as_dtype, truncated_normal
from l2r.routers.config import check
from l2r.routers.holder import parameter
from l2r.routers.registry import register_router


@dataclasses.dataclass(frozen=True, kw_only=True)
class L2RConfig(AnchorConfig):
    """rank: size of the query. heads: anchors per expert.

    init_std: of W_q; None gives hidden_size ** -0.5, so that queries start with unit variance
    at any width (0.022 at OLMoE's 2048, whose own 0.02 the paper does not override).
    """

    rank: int = 2
    heads: int = 16
    init_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.rank >= 1, self, "rank", ">= 1")
        check(self.heads >= 1, self, "heads", ">= 1")
        check(self.init_std is None or self.init_std > 0, self, "init_std", "None or > 0")

    @classmethod
    def for_experts(cls, *, num_experts: int, hidden_size: int, top_k: int) -> "L2RConfig":
        """Choose anchors and rank by the number of experts, from the committed studies.

        SIPS, gamma 4, weights normalized. Up to 64 experts: 4 anchors of rank 8, the best of 15
        settings at 16 experts (study ``screen``; judged in ``decision``); at 64 it lost 0.021 nats
        to a linear router in ``experts-64``; in ``ranked-64`` rank 16 with one anchor was as good.
        At 256: 1 anchor of rank 8 (``rank-8-of-256``; on other text and twice the width,
        ``transfer``). Above: rank 32 (``experts-1024``, where rank 8 lost to a linear router; in
        ``ranked-1024`` X-MoE of rank 32 was better). In between: 2 anchors, which no study has
        tried. The rank is at most ``hidden_size``. With ``top_k`` 1 weights stay as they are. All
        were found without a z-loss and for language.
        Raises ValueError for impossible sizes.
        """
        if min(num_experts, hidden_size, top_k) < 1 or top_k > num_experts:
            raise InputError(
                "num_experts, hidden_size and top_k must be >= 1, top_k <= num_experts; got "
                f"num_experts={num_experts}, hidden_size={hidden_size}, top_k={top_k}"
            )
        heads = 4 if num_experts <= 64 else 2 if num_experts < 256 else 1
        rank = min(8 if num_experts <= 256 else 32, hidden_size)
        return cls(gamma=4.0, rank=rank, heads=heads, normalize_weights=top_k > 1)


@register_router("l2r_dot", scoring="dot")
@register_router("l2r_cosine", scoring="cosine")
@register_router("l2r_sips", scoring="sips")
class L2RRouter(AnchorRouter):
    """Parameters: ``norm.weight`` [D], ``projection.weight`` [R, D], ``anchors`` [N, H, R]."""

    Config = L2RConfig
    holders = ("norm", "projection")

    def __init__(self, config: L2RConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        if config.rank > self.hidden_size:
            raise InputError(
                f"rank must be <= hidden_size; got rank={config.rank}, "
                f"hidden_size={self.hidden_size}; lower rank"
            )
        self.heads = config.heads
        self.projection = BareLinear(self.hidden_size, config.rank)
        self.anchors = nn.Parameter(torch.empty(self.num_experts, config.heads, config.rank))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        std = self.config.init_std or self.hidden_size**-0.5
        truncated_normal(self.projection.weight, std)

    def query(self, x: Tensor) -> Tensor:
        x, dtype = self._prepare(x), self.compute_dtype(x)
        weight = self.projection.weight.to(dtype)
        return dispatch.routing_query(x, weight, self.gain(dtype), self.score)

    def kernel_weights(self, x: Tensor) -> KernelWeights | None:
        """None where a batch statistic or a learned temperature is between the steps."""
        if self.magnitude_norm is not None or self.log_temperature is not None:
            return None
        dtype, projection = self.compute_dtype(x), self._modules["projection"]
        assert projection is not None
        weight = as_dtype(parameter(projection, "weight"), dtype)
        return weight, self.gain(dtype), as_dtype(parameter(self, "anchors"), dtype)
