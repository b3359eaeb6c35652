"""X-MoE (Chi et al., 2022): low-rank cosine routing, with the presets of three code bases.

The references disagree (docs/paper-notes.md); the default has no bias, rank N / 2 as in the
paper's table, both sides normalized, orthogonal anchors and a fixed temperature.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from l2r.errors import InputError
from l2r.functional import unit
from l2r.functional.scoring import ScoreConstants
from l2r.kernels import dispatch
from l2r.kernels.plain import KernelWeights
from l2r.routers.base import Router, register_router, truncated_normal
from l2r.routers.config import RouterConfig, check
from l2r.routers.holder import BareLinear
from l2r.routers.selection_rule import Selection

# Settings of three code bases; docs/paper-notes.md says where they disagree.
PRESETS: dict[str, dict[str, Any]] = {
    "torchscale": {
        "rank": 16,
        "anchor_scale": 0.32,
        "anchor_norm": 1.5,
        "normalize_query": False,
    },
    "fairseq": {
        "rank": 16,
        "anchor_scale": 0.1,
        "eps": 1e-4,
        "temperature": 0.07,
        "learn_temperature": True,
        "min_temperature": 1e-4,
        "gate": "sigmoid",
    },
    "tutel": {
        "rank": 256,
        "bias": True,
        "anchor_init": "normal",
        "anchor_scale": 0.01,
        "temperature": 0.5,
        "learn_temperature": True,
        "min_temperature": 0.01,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class XMoEConfig(RouterConfig):
    """rank: size of the query, None for num_experts // 2.

    init_std: of the projection, cut at 3 sigma; None draws it as nn.Linear does, with a standard
    deviation of (3 hidden_size) ** -0.5. bias: of the projection.
    normalize_query: cosine on both sides, else on the anchors alone.
    anchor_init: orthogonal or normal, scaled by anchor_scale. anchor_norm: norm that the
    stored anchors are pulled back to after every step, None to leave them (the logits see unit
    anchors either way; a smaller norm learns faster). min_temperature: floor of a learned
    temperature. gate: softmax over experts, or an independent sigmoid for each.
    """

    read_with: ClassVar = {
        "min_temperature": {"learn_temperature": (True,)},
        "normalize_weights": {"gate": ("softmax",)},
    }

    rank: int | None = None
    init_std: float | None = None
    bias: bool = False
    normalize_query: bool = True
    anchor_init: Literal["orthogonal", "normal"] = "orthogonal"
    anchor_scale: float = 1.0
    anchor_norm: float | None = None
    eps: float = 1e-6
    min_temperature: float = 0.01
    gate: Literal["softmax", "sigmoid"] = "softmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.rank is None or self.rank >= 1, self, "rank", "None or >= 1")
        check(self.init_std is None or self.init_std > 0, self, "init_std", "None or > 0")
        check(self.anchor_scale > 0, self, "anchor_scale", "> 0")
        check(self.anchor_norm is None or self.anchor_norm > 0, self, "anchor_norm", "None or > 0")
        check(self.eps > 0, self, "eps", "> 0")
        check(self.min_temperature > 0, self, "min_temperature", "> 0")

    @classmethod
    def preset(cls, source: str) -> "XMoEConfig":
        """List the settings of ``torchscale`` 0.3.0, ``fairseq`` (the fork) or ``tutel``."""
        if source not in PRESETS:
            raise InputError(f"preset must be one of {', '.join(PRESETS)}; got {source!r}")
        return cls(**PRESETS[source])


@register_router("xmoe")
class XMoERouter(Router):
    """Parameters: ``projection.weight`` [R, D] (``.bias`` [R]) and ``anchors`` [N, 1, R]."""

    Config = XMoEConfig
    holders = ("projection",)

    def __init__(self, config: XMoEConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.score = ScoreConstants("cosine", eps=config.eps, scale=1 / config.temperature)
        rank = config.rank or max(1, self.num_experts // 2)
        self.projection = BareLinear(self.hidden_size, rank, bias=config.bias)
        self.anchors = nn.Parameter(torch.empty(self.num_experts, 1, rank))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.projection.reset_parameters()
        if self.config.init_std is not None:
            truncated_normal(self.projection.weight, self.config.init_std)
        anchors, scale = self.anchors[:, 0], self.config.anchor_scale
        if self.config.anchor_init == "normal":
            nn.init.normal_(anchors, std=scale)
        elif not anchors.is_meta:
            nn.init.orthogonal_(anchors, gain=scale)
        self.constrain()

    @torch.no_grad()
    def constrain(self) -> None:
        """Anchors to their fixed norm, if they have one.

        NOTE: TorchScale rescales its parameter in every forward, where FSDP2 holds a copy that
        it throws away. We do after every step (l2r.routers.constrain), which gives the same
        sequence of weights.
        """
        if self.config.anchor_norm is not None:
            anchors = unit(self.anchors) * self.config.anchor_norm
            if is_parametrized(self, "anchors"):  # what is read is computed
                self.anchors = anchors
            else:
                self.anchors.copy_(anchors)

    def query(self, x: Tensor) -> Tensor:
        x, dtype = self._prepare(x), self.compute_dtype(x)
        query = dispatch.routing_query(x, self.projection.weight.to(dtype))
        return query if self.projection.bias is None else query + self.projection.bias.to(dtype)

    def kernel_weights(self, x: Tensor) -> KernelWeights | None:
        """None where the variant is not the plain cosine router."""
        c, dtype = self.config, self.compute_dtype(x)
        if not c.normalize_query or self.log_temperature is not None:
            return None
        if self.projection.bias is not None:
            return None
        return self.projection.weight.to(dtype), None, self.anchors.to(dtype)

    def raw_logits(self, x: Tensor) -> Tensor:
        query = self.query(x)
        anchors, score = self.anchors.to(query.dtype), self.score._replace(scale=1.0)
        if not self.config.normalize_query:
            anchors = unit(anchors, eps=self.config.eps)
            score = score._replace(scoring="dot")
        return dispatch.anchor_logits(query, anchors, score)

    def own_selection(self) -> Selection:
        return Selection(gate=self.config.gate, normalize=self.config.normalize_weights)

    def _tempered(self, logits: Tensor) -> Tensor:
        if self.log_temperature is None:
            return super()._tempered(logits)
        floor = math.log(self.config.min_temperature)
        return logits * torch.exp(-self.log_temperature.clamp_min(floor))
