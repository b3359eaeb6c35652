"""Mixture-of-experts layer: stacked experts, dropless dispatch.

Imports routers/ and below. Begin at layer.py.
"""

from l2r.moe.experts import Experts
from l2r.moe.layer import MoELayer

__all__ = ["Experts", "MoELayer"]
