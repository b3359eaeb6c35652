"""Models: OLMoE and ViT with routers of ours, on transformers.

Importing this package registers our model types with transformers' Auto classes.
"""

from importlib import import_module
from typing import Any

from l2r.imports import named

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
    )

    from l2r.hf.models.olmoe import L2rOlmoeConfig, L2rOlmoeForCausalLM, L2rOlmoeModel
    from l2r.hf.models.vit import L2rViTConfig, L2rViTForImageClassification, L2rViTModel
except ImportError as error:
    raise named(error, "lm") from error

__all__ = [
    "L2rOlmoeConfig",
    "L2rOlmoeForCausalLM",
    "L2rOlmoeModel",
    "L2rViTConfig",
    "L2rViTForImageClassification",
    "L2rViTModel",
]

AutoConfig.register(L2rOlmoeConfig.model_type, L2rOlmoeConfig, exist_ok=True)
AutoModel.register(L2rOlmoeConfig, L2rOlmoeModel, exist_ok=True)
AutoModelForCausalLM.register(L2rOlmoeConfig, L2rOlmoeForCausalLM, exist_ok=True)
AutoConfig.register(L2rViTConfig.model_type, L2rViTConfig, exist_ok=True)
AutoModel.register(L2rViTConfig, L2rViTModel, exist_ok=True)
AutoModelForImageClassification.register(L2rViTConfig, L2rViTForImageClassification, exist_ok=True)

# Where version 0.1.0 had them; they live in the rooms above this one.
_MOVED = {
    "is_image_classifier": "l2r.hf.checkpoints",
    "load_causal_lm": "l2r.hf.checkpoints",
    "load_image_classifier": "l2r.hf.checkpoints",
    "load_pretrained": "l2r.hf.checkpoints",
    "swap_routers": "l2r.hf.swap",
}


def __getattr__(name: str) -> Any:
    """A name that moved, on first use."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MOVED[name]), name)
