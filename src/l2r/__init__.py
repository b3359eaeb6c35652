"""L2R: low-rank and Lipschitz-controlled routing for mixture-of-experts in PyTorch."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from l2r.models.pretrained import load_pretrained

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
    "load_pretrained",
    "register_router",
    "router_names",
]


def __getattr__(name: str) -> Any:
    """``load_pretrained`` on first use, so that importing l2r does not import transformers."""
    if name == "load_pretrained":
        from l2r.models.pretrained import load_pretrained

        return load_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
