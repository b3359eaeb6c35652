"""Mixture of routers (Router Upcycling, Ran et al., arXiv 2509.00679).

M small routers, started from the heads of the preceding attention layer, each turn the token
into a query and compare it with the experts' features, which serve as keys, as attention does.

NOTE: the source leaves open how the routers' opinions are joined and we read "mixture"
literally: p = mean over m of softmax_n(q_m . k_mn / sqrt(R)); the logits are log p. With a plain
sum of scores the M routers would collapse into one linear router of rank M R. Keys are newly
drawn per router and expert. Only the abstract of the source was read.
"""

import dataclasses
import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from l2r.kernels import dispatch
from l2r.routers.base import Router, as_dtype, register_router
from l2r.routers.config import RouterConfig, check
from l2r.routers.holder import BareLinear


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureConfig(RouterConfig):
    """routers: how many, M. rank: size of each router's query, R (a head's size)."""

    routers: int = 4
    rank: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.routers >= 1, self, "routers", ">= 1")
        check(self.rank >= 1, self, "rank", ">= 1")


@register_router("mixture")
class MixtureRouter(Router):
    """Parameters: ``projection.weight`` [M R, D] and ``keys`` [M, N, R]."""

    Config = MixtureConfig
    holders = ("projection",)

    def __init__(self, config: MixtureConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.projection = BareLinear(self.hidden_size, config.routers * config.rank)
        self.keys = nn.Parameter(torch.empty(config.routers, self.num_experts, config.rank))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Return queries and keys of unit variance, so that scores / sqrt(R) have it too."""
        super().reset_parameters()
        nn.init.normal_(self.projection.weight, std=self.hidden_size**-0.5)
        nn.init.normal_(self.keys)

    @torch.no_grad()
    def start_from_heads(self, query_weight: Float[Tensor, "O D"]) -> None:
        """Take the first M R rows of an attention layer's query projection, head after head."""
        rows = self.projection.weight.shape[0]
        if query_weight.shape[0] < rows or query_weight.shape[1] != self.hidden_size:
            raise ValueError(
                f"query_weight must have at least {rows} rows and {self.hidden_size} columns; "
                f"got shape {tuple(query_weight.shape)}"
            )
        self.projection.weight.copy_(query_weight[:rows])

    def query(self, x: Tensor) -> Tensor:
        x, dtype = self._prepare(x), self.compute_dtype(x)
        return dispatch.routing_query(x, as_dtype(self.projection.weight, dtype))

    def raw_logits(self, x: Tensor) -> Tensor:
        count, rank = self.config.routers, self.config.rank
        query = self.query(x).view(-1, count, rank)
        scores = torch.einsum("tmr,mnr->tmn", query, self.keys.to(query.dtype)) / math.sqrt(rank)
        return torch.logsumexp(torch.log_softmax(scores, dim=-1), dim=1) - math.log(count)
