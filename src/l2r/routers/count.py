"""Parameters and cost of a router, counted on the module itself without allocating it."""

from typing import Any

import torch

from l2r.errors import InputError
from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.routers.base import Router, build_router
from l2r.routers.config import RouterConfig


def router_parameters(
    kind: str | RouterConfig, *, hidden_size: int, num_experts: int, **options: Any
) -> int:
    """Count the ters of one router; the RMSNorm gain counts, as in the paper's table."""
    sizes = {"hidden_size": hidden_size, "num_experts": num_experts}
    return sum(parameter.numel() for parameter in _on_meta(kind, **sizes, **options).parameters())


def router_cost(
    kind: str | RouterConfig, *, hidden_size: int, num_experts: int, **options: Any
) -> int:
    """Multiply-adds of one router's matrix products for one token (paper, Eq. 29 and 32).

    d N for linear routers, d r + N H r for L2R, X-MoE and low rank, d r + (A + B) r / 2 for product
    keys on a grid A x B: every entry of a weight matrix meets the token once. Norms, tanh, pooling
    and the sums over a grid are left out, as in the paper. Raises ValueError for routers that do
    more with their matrices (attention, mixture).
    """
    sizes = {"hidden_size": hidden_size, "num_experts": num_experts}
    router = _on_meta(kind, **sizes, **options)
    if router.config.kind not in _ONE_PASS:
        raise InputError(
            f"router must be among {', '.join(_ONE_PASS)} for its cost; got {router.config.kind}"
        )
    return sum(p.numel() for p in router.parameters() if p.dim() > 1)


# Routers in which a token meets every entry of every matrix just once.
_ONE_PASS = (*PAPER_ROUTERS, "low_rank", "product_keys")


def _on_meta(kind: str | RouterConfig, **options: Any) -> Router:
    with torch.device("meta"):
        return build_router(kind, top_k=options["num_experts"], **options)  # 1 may be refused
