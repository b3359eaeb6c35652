"""Routers: parameters plus a call into l2r.kernels.dispatch, a file per router.

Imports kernels/ and below. Begin at base.py, which every router extends, and l2r.py, the paper's;
selection_rule.py says how experts are chosen from logits.
"""

from l2r.routers.base import Router, RouterOutput, constrain
from l2r.routers.capture import Captured, capture
from l2r.routers.config import RouterConfig, make_config, router_names
from l2r.routers.l2r import L2RConfig, L2RRouter
from l2r.routers.linear import LinearConfig, LinearRouter
from l2r.routers.linear_sips import LinearSipsConfig, LinearSipsRouter
from l2r.routers.registry import build_router, register_router
from l2r.routers.xmoe import XMoEConfig, XMoERouter
from l2r.routers.zoo.attention import AttentionConfig, AttentionRouter
from l2r.routers.zoo.low_rank import LowRankConfig, LowRankRouter
from l2r.routers.zoo.mixture import MixtureConfig, MixtureRouter
from l2r.routers.zoo.perturbed_cosine import PerturbedCosineConfig, PerturbedCosineRouter
from l2r.routers.zoo.product_keys import ProductKeysConfig, ProductKeysRouter
from l2r.routers.zoo.sigmoid import SigmoidConfig, SigmoidRouter, update_selection_bias

__all__ = [
    "AttentionConfig",
    "AttentionRouter",
    "Captured",
    "L2RConfig",
    "L2RRouter",
    "LinearConfig",
    "LinearRouter",
    "LinearSipsConfig",
    "LinearSipsRouter",
    "LowRankConfig",
    "LowRankRouter",
    "MixtureConfig",
    "MixtureRouter",
    "PerturbedCosineConfig",
    "PerturbedCosineRouter",
    "ProductKeysConfig",
    "ProductKeysRouter",
    "Router",
    "RouterConfig",
    "RouterOutput",
    "SigmoidConfig",
    "SigmoidRouter",
    "XMoEConfig",
    "XMoERouter",
    "build_router",
    "capture",
    "constrain",
    "make_config",
    "register_router",
    "router_names",
    "update_selection_bias",
]
