"""Parameters of a router, counted on the module itself without allocating it."""

from typing import Any

import torch

from l2r.routers.config import RouterConfig
from l2r.routers.registry import build_router


def router_parameters(
    kind: str | RouterConfig, *, hidden_size: int, num_experts: int, **options: Any
) -> int:
    """Number of parameters of one router; the RMSNorm gain counts, as in the paper's table."""
    with torch.device("meta"):
        router = build_router(
            kind, hidden_size=hidden_size, num_experts=num_experts, top_k=1, **options
        )
    return sum(parameter.numel() for parameter in router.parameters())
