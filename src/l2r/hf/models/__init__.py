"""Models: OLMoE and ViT with routers of ours, on transformers.

Importing this package registers our model types with transformers' Auto classes.
"""

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
