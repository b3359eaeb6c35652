"""Routers of ours in the place of a model family's own."""

from l2r.swap.swap import swap_routers

__all__ = ["swap_routers"]
