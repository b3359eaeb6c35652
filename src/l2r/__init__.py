"""L2R: low-rank and Lipschitz-controlled routing for mixture-of-experts in PyTorch.

Every name below is imported on first use, so that ``import l2r`` needs neither torch nor time. It
does one thing: transformers' Auto classes learn our model types (``auto_classes``).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from l2r import auto_classes
from l2r._version import __version__
from l2r.imports import Missing, MissingExtraError

if TYPE_CHECKING:
    from l2r.functional import load_balancing_loss, router_z_loss
    from l2r.hf.checkpoints import load_pretrained
    from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
    from l2r.hf.routes import Routes
    from l2r.hf.routes.record import record
    from l2r.hf.routes.replay import replay
    from l2r.hf.swap import swap_routers
    from l2r.routers import (
        L2RConfig,
        LinearConfig,
        LinearSipsConfig,
        Router,
        RouterConfig,
        RouterOutput,
        XMoEConfig,
        build_router,
        register_router,
        router_names,
    )
    from l2r.routers.capture import capture
    from l2r.training.fit import fit_routers


_HOMES = {
    "l2r.hf.checkpoints": ("load_pretrained",),
    "l2r.functional": ("load_balancing_loss", "router_z_loss"),
    "l2r.hf.models": ("L2rOlmoeConfig", "L2rOlmoeForCausalLM"),
    "l2r.routers": (
        "L2RConfig", "LinearConfig", "LinearSipsConfig", "Router", "RouterConfig", "RouterOutput",
        "XMoEConfig", "build_router", "capture", "register_router", "router_names",
    ),
    "l2r.hf.routes": ("Routes",),
    "l2r.hf.routes.record": ("record",),
    "l2r.hf.routes.replay": ("replay",),
    "l2r.hf.swap": ("swap_routers",),
    "l2r.training.fit": ("fit_routers",),
}  # fmt: skip
_ROOMS = ("functional", "routers")  # that version 0.2.0 imported
_HOME = {name: home for home, names in _HOMES.items() for name in names}

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
    """A public name on first use."""
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return globals().setdefault(name, getattr(import_module(_HOME[name]), name))
    except MissingExtraError as error:
        return Missing(name, error)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
