"""Attention over sequences that are whole: no mask is made, and none is looked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "l2r_whole_sequences"  # without a mask function of this name none is called
AttentionInterface.register(_NAME, sdpa_attention_forward)


@contextmanager
def reading_whole_sequences(model: Any) -> Iterator[None]:
    """Inside, ``model`` gets rows of tokens without padding, each one sequence, without a cache.

    To learn as much, transformers reads positions back from the device in every forward pass.
    """
    config = getattr(model, "module", model).config
    if getattr(config, "_attn_implementation", None) != "sdpa":
        yield
        return
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
