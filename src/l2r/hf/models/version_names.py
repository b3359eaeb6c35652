"""Names that differ between the versions of transformers that we allow."""

from typing import Any

from transformers.modeling_outputs import MoeCausalLMOutputWithPast

# The key-value cache in a model's call and in its answer. Before 5.24 transformers has the second
# name only, deprecated since.
CACHE = "cache" if hasattr(MoeCausalLMOutputWithPast, "cache") else "past_key_values"


def checkpoint_activations(model: Any) -> None:
    """Recompute activations in the backward pass instead of keeping them.

    The reentrant kind would drop the gradients of losses on router outputs, so it is not used.
    """
    # Before 5.23 transformers has only the second name, deprecated since.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})
