"""Routers of ours in the place of a model family's own."""

from l2r.imports import named

try:
    from l2r.swap.swap import swap_routers
except ImportError as error:
    raise named(error, "lm") from error

__all__ = ["swap_routers"]
