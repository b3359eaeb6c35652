"""L2R: low-rank and Lipschitz-controlled routing for mixture-of-experts in PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from l2r import auto_classes
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.imports import Missing, MissingExtraError
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
    from l2r.checkpoints import load_pretrained
    from l2r.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
    from l2r.routes import Routes
    from l2r.routes.record import record
    from l2r.routes.replay import replay
    from l2r.swap import swap_routers
    from l2r.training.fit import fit_routers

__version__ = "0.2.0"

# Imported on first use: all but Routes need transformers.
_LAZY = {
    "L2rOlmoeConfig": "l2r.models",
    "L2rOlmoeForCausalLM": "l2r.models",
    "fit_routers": "l2r.training.fit",
    "Routes": "l2r.routes",
    "load_pretrained": "l2r.checkpoints",
    "record": "l2r.routes.record",
    "replay": "l2r.routes.replay",
    "swap_routers": "l2r.swap",
}

__all__ = [
    "L2RConfig",
    "L2rOlmoeConfig",
    "L2rOlmoeForCausalLM",
    "LinearConfig",
    "LinearSipsConfig",
    "Router",
    "RouterConfig",
    "RouterOutput",
    "Routes",
    "XMoEConfig",
    "__version__",
    "build_router",
    "capture",
    "fit_routers",
    "load_balancing_loss",
    "load_pretrained",
    "record",
    "register_router",
    "replay",
    "router_names",
    "router_z_loss",
    "swap_routers",
]


auto_classes.register()


def __getattr__(name: str) -> Any:
    """A lazy name on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except MissingExtraError as error:
        return Missing(name, error)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
