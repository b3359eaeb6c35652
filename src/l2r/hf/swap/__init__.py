"""Routers of ours in the place of a model family's own."""

from l2r.imports import named

try:
    from l2r.hf.swap.swap import swap_routers
    from l2r.hf.swap.trainable import freeze_routers, train_routers_only
except ImportError as error:
    raise named(error, "lm") from error

__all__ = ["freeze_routers", "swap_routers", "train_routers_only"]
