"""Attention router of Yuan 2.0-M32 (Wu et al., arXiv 2405.17976, Section 2.2).

Every token makes a query, a key and a value with one entry per expert. The experts attend to
each other, z = softmax(q k^T) v with the softmax over the key's experts and no scaling, so that
the logit of an expert depends on how it correlates with the others. One head; the weights are
renormalized, as in Yuan's code.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from l2r.routers.base import Router, register_router, truncated_normal
from l2r.routers.config import RouterConfig, check
from l2r.routers.holder import BareLinear


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(RouterConfig):
    """init_std: of the three matrices, cut at 3 sigma. Yuan renormalizes the top-k weights."""

    normalize_weights: bool = True
    init_std: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.init_std > 0, self, "init_std", "> 0")


@register_router("attention")
class AttentionRouter(Router):
    """Parameters: ``query_key_value.weight`` [3 N, D], query rows first, as Yuan stores them."""

    Config = AttentionConfig
    holders = ("query_key_value",)

    def __init__(self, config: AttentionConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.query_key_value = BareLinear(self.hidden_size, 3 * self.num_experts)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        truncated_normal(self.query_key_value.weight, self.config.init_std)

    def raw_logits(self, x: Tensor) -> Tensor:
        x = x.to(self.compute_dtype(x))
        mixed = x @ self.query_key_value.weight.to(x.dtype).T
        query, key, value = mixed.chunk(3, dim=-1)
        attention = torch.softmax(query.unsqueeze(-1) * key.unsqueeze(-2), dim=-1)
        return (attention @ value.unsqueeze(-1)).squeeze(-1)
