"""Mixture-of-experts layer: stacked experts, dropless dispatch.

Imports routers/ and below. Begin at layer.py.
"""

from l2r.moe.layer import Experts, MoELayer

__all__ = ["Experts", "MoELayer"]
