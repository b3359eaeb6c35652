"""Hugging Face: models of ours, our routers in other families, routes, checkpoints in and out.

Imports moe/ and below. Begin at swap/swap.py (a swap), checkpoints/pretrained.py (a load) or
routes/replaying.py (the same experts again).
"""

from l2r.imports import check_extra

check_extra("lm")
