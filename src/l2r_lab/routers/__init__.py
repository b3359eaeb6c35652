"""Routers beyond the paper: a file each; importing this package registers all of them.

product_top_k.py is the selection of product_keys.py.
"""

from l2r_lab.routers.attention import AttentionConfig, AttentionRouter
from l2r_lab.routers.low_rank import LowRankConfig, LowRankRouter
from l2r_lab.routers.mixture import MixtureConfig, MixtureRouter
from l2r_lab.routers.perturbed_cosine import PerturbedCosineConfig, PerturbedCosineRouter
from l2r_lab.routers.product_keys import ProductKeysConfig, ProductKeysRouter
from l2r_lab.routers.sigmoid import SigmoidConfig, SigmoidRouter

__all__ = [
    "AttentionConfig",
    "AttentionRouter",
    "LowRankConfig",
    "LowRankRouter",
    "MixtureConfig",
    "MixtureRouter",
    "PerturbedCosineConfig",
    "PerturbedCosineRouter",
    "ProductKeysConfig",
    "ProductKeysRouter",
    "SigmoidConfig",
    "SigmoidRouter",
]
