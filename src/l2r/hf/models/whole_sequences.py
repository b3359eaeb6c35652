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
    """Tell ``model`` that rows are whole sequences, without padding or a cache, inside the block.

    Otherwise transformers copies position_ids to the CPU every step.
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
