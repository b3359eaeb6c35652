"""Linear router, Eq. 4: one dot product per expert in the hidden space (OLMoE's own router)."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from l2r.kernels import dispatch
from l2r.routers.base import Router, register_router, truncated_normal
from l2r.routers.config import RouterConfig, check


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(RouterConfig):
    """init_std: standard deviation of the initial weights, cut at 3 sigma (OLMoE: 0.02).

    None gives hidden_size ** -0.5, with which logits start equally large at any width.
    """

    init_std: float | None = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.init_std is None or self.init_std > 0, self, "init_std", "None or > 0")


@register_router("linear")
class LinearRouter(Router):
    """Parameters: ``weight`` [N, D], named and shaped as in Hugging Face MoE routers."""

    Config = LinearConfig

    def __init__(self, config: LinearConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        truncated_normal(self.weight, self.config.init_std or self.hidden_size**-0.5)

    def raw_logits(self, x: Tensor) -> Tensor:
        return dispatch.linear_logits(x, self.weight.to(self.compute_dtype(x)))
