"""Routers: parameters plus a call into l2r.kernels.dispatch, a file per router.

Imports kernels/ and below. Begin at base.py, which every router extends, and l2r.py, the paper's;
selection_rule.py says how experts are chosen from logits.
"""

from l2r.routers.base import Router, RouterOutput, build_router, constrain, register_router
from l2r.routers.capture import Captured, capture
from l2r.routers.config import RouterConfig, make_config, router_names
from l2r.routers.l2r import L2RConfig, L2RRouter, LinearSipsConfig, LinearSipsRouter
from l2r.routers.linear import LinearConfig, LinearRouter
from l2r.routers.losses import RouterLossValues, StepLoads, router_losses, step_loads
from l2r.routers.selection_bias import update_selection_bias
from l2r.routers.xmoe import XMoEConfig, XMoERouter

__all__ = [
    "Captured",
    "L2RConfig",
    "L2RRouter",
    "LinearConfig",
    "LinearRouter",
    "LinearSipsConfig",
    "LinearSipsRouter",
    "Router",
    "RouterConfig",
    "RouterLossValues",
    "RouterOutput",
    "StepLoads",
    "XMoEConfig",
    "XMoERouter",
    "build_router",
    "capture",
    "constrain",
    "make_config",
    "register_router",
    "router_losses",
    "router_names",
    "step_loads",
    "update_selection_bias",
]
