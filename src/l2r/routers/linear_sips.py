"""Linear router with SIPS: the paper's control that scores in the hidden space itself."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from l2r.functional import rms_norm
from l2r.routers.anchor_router import AnchorConfig, AnchorRouter
from l2r.routers.config import check
from l2r.routers.registry import register_router


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSipsConfig(AnchorConfig):
    """SIPS with the identity as projection and one anchor per expert."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.scoring == "sips", self, "scoring", "sips in a linear_sips router")


@register_router("linear_sips", scoring="sips")
class LinearSipsRouter(AnchorRouter):
    """Parameters: ``norm.weight`` [D] and ``anchors`` [N, 1, D]."""

    Config = LinearSipsConfig
    holders = ("norm",)

    def __init__(self, config: LinearSipsConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.anchors = nn.Parameter(torch.empty(self.num_experts, 1, self.hidden_size))
        self.reset_parameters()

    def query(self, x: Tensor) -> Tensor:
        x = self._prepare(x).to(self.compute_dtype(x))
        gain = self.gain(x.dtype)
        return x if gain is None else rms_norm(x, gain, eps=self.config.norm_eps)
