"""L2R: low-rank and Lipschitz-controlled routing for mixture-of-experts in PyTorch."""

from l2r.routers import (
    L2RConfig,
    LinearConfig,
    LinearSipsConfig,
    Router,
    RouterConfig,
    RouterOutput,
    XMoEConfig,
    build_router,
    capture,
    register_router,
    router_names,
)

__version__ = "0.1.0"

__all__ = [
    "L2RConfig",
    "LinearConfig",
    "LinearSipsConfig",
    "Router",
    "RouterConfig",
    "RouterOutput",
    "XMoEConfig",
    "__version__",
    "build_router",
    "capture",
    "register_router",
    "router_names",
]
