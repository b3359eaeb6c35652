"""Tiny checkpoints and their tokenizers, shared with other rooms."""

from tests.checkpoints import checkpoint, model, olmoe_tokenizer, small_tokenizer

__all__ = ["checkpoint", "model", "olmoe_tokenizer", "small_tokenizer"]
