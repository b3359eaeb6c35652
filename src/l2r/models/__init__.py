"""Models: OLMoE on transformers, ViT, and router swaps in other model families.

Importing this package registers our model types with transformers' Auto classes.
"""

from l2r.models.classifier import is_image_classifier, load_image_classifier
from l2r.models.loading import load_causal_lm
from l2r.models.olmoe import L2rOlmoeConfig, L2rOlmoeForCausalLM, L2rOlmoeModel
from l2r.models.pretrained import load_pretrained
from l2r.models.swap import swap_routers
from l2r.models.vit import L2rViTConfig, L2rViTForImageClassification, L2rViTModel

__all__ = [
    "L2rOlmoeConfig",
    "L2rOlmoeForCausalLM",
    "L2rOlmoeModel",
    "L2rViTConfig",
    "L2rViTForImageClassification",
    "L2rViTModel",
    "is_image_classifier",
    "load_causal_lm",
    "load_image_classifier",
    "load_pretrained",
    "swap_routers",
]
