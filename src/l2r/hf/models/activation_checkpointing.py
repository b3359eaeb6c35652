"""Activation checkpointing that keeps the routers' gradients, under every transformers we allow."""

from typing import Any


def checkpoint_activations(model: Any) -> None:
    """Recompute activations in the backward pass instead of keeping them.

    The reentrant kind would drop the gradients of losses on router outputs, so it is not used.
    """
    # Before 5.23 transformers has the second name alone, which it deprecates since.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})
