"""Models: OLMoE and ViT with routers of ours, on transformers.

Importing this package registers our model types with transformers' Auto classes.
"""

from l2r.models.olmoe import L2rOlmoeConfig, L2rOlmoeForCausalLM, L2rOlmoeModel
from l2r.models.vit import L2rViTConfig, L2rViTForImageClassification, L2rViTModel

__all__ = [
    "L2rOlmoeConfig",
    "L2rOlmoeForCausalLM",
    "L2rOlmoeModel",
    "L2rViTConfig",
    "L2rViTForImageClassification",
    "L2rViTModel",
]
