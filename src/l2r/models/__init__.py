"""Models: OLMoE on transformers, ViT, and router swaps in other model families.

Importing this package registers our model types with transformers' Auto classes.
"""

from l2r.models.loading import load_causal_lm
from l2r.models.olmoe import L2rOlmoeConfig, L2rOlmoeForCausalLM, L2rOlmoeModel

__all__ = ["L2rOlmoeConfig", "L2rOlmoeForCausalLM", "L2rOlmoeModel", "load_causal_lm"]
