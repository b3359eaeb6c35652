"""Checkpoints in and out: stock models, ours, and models with swapped routers."""

from l2r.imports import named

try:
    from l2r.hf.checkpoints.loading import (
        is_image_classifier,
        load_causal_lm,
        load_image_classifier,
    )
    from l2r.hf.checkpoints.pretrained import load_pretrained
except ImportError as error:
    raise named(error, "lm") from error

__all__ = ["is_image_classifier", "load_causal_lm", "load_image_classifier", "load_pretrained"]
