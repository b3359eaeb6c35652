"""Name of the key-value cache in a model's call and in its answer, under every transformers."""

from transformers.modeling_outputs import MoeCausalLMOutputWithPast

# Before 5.24 transformers has the second name alone, which it deprecates since.
CACHE = "cache" if hasattr(MoeCausalLMOutputWithPast, "cache") else "past_key_values"
