"""Batches of token ids that a fit reads, and the perplexity over them."""

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from l2r.errors import InputError
from l2r.training.data.sample_text import spread_rows
from l2r.training.evaluation.perplexity import token_losses


@torch.no_grad()
def perplexity(model: Any, batches: Sequence[Int[Tensor, "_ S"]]) -> float:
    """exp of the mean next-token cross-entropy over all batches."""
    total, count = 0.0, 0
    for ids in batches:
        losses = token_losses(model, ids)
        total, count = total + float(losses.sum()), count + losses.numel()
    return math.exp(total / count)


class Cut(NamedTuple):
    """tokenizer, length and size: of texts; batches of token ids stay as they are."""

    tokenizer: Any
    length: int
    size: int
    device: torch.device

    def batches(self, data: Sequence[str] | Sequence[Tensor]) -> list[Tensor]:
        """Batches [B, S] of token ids on the device. Raises ValueError for too little data."""
        texts = [part for part in data if isinstance(part, str)]
        tensors = [part for part in data if isinstance(part, Tensor)]
        if len(texts) + len(tensors) < len(data) or (texts and tensors):
            kinds = ", ".join(sorted({type(part).__name__ for part in data}))
            raise InputError(f"data must hold texts or tensors of token ids; got {kinds}")
        if texts and self.tokenizer is None:
            raise InputError("data that are texts need a tokenizer; pass tokenizer=...")
        if texts:
            rows = spread_rows(self.tokenizer, [texts], sys.maxsize, self.length).rows
            if not rows:
                raise InputError(
                    f"data must give at least {self.length} tokens to fit on and as many to "
                    f"measure on; got fewer; give more text or a shorter sequence_length"
                )
            tensors = list(torch.split(torch.stack(rows), self.size))
        if not tensors:
            raise InputError("data must hold at least two texts or batches; got fewer")
        return [ids.to(self.device) for ids in tensors]
