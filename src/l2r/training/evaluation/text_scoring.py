"""Log-probability of whole documents, of any length, by windows over their tokens."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.hf.checkpoints import token_ids
from l2r.routers.observe import evaluating
from l2r.routers.offload import device_of
from l2r.training.evaluation.evaluation_settings import Windows
from l2r.training.evaluation.perplexity import token_losses

Tokens = Int[Tensor, "_"]
_LOGITS = 1 << 28  # of one forward pass: 1 GiB in float32


def start_token(tokenizer: Any, config: Any) -> int | None:
    """What the first token of a document is predicted from, None where there is nothing.

    The token that the tokenizer itself puts before a text, or end-of-text, which precedes a
    document where documents are packed.
    """
    bos = tokenizer.bos_token_id
    if bos is not None and token_ids(tokenizer, "a")[:1] == [bos]:
        return int(bos)
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    eos = config.eos_token_id
    return eos if isinstance(eos, int) and eos < config.get_text_config().vocab_size else None


def read_tokens(tokenizer: Any, text: str, vocab_size: int) -> Tokens:
    """Token ids of a text, in which the names of special tokens are text.

    Raises ValueError for ids outside the vocabulary.
    """
    options = {"add_special_tokens": False, "split_special_tokens": True}
    ids: list[int] = token_ids(tokenizer, text, **options)
    if ids and max(ids) >= vocab_size:
        raise InputError(
            f"token ids must be below the checkpoint's vocab_size {vocab_size}; got {max(ids)}"
        )
    return torch.tensor(ids, dtype=torch.int32)


def document_losses(
    model: nn.Module,
    documents: Sequence[Tokens],
    *,
    start: int | None,
    windows: Windows,
    vocab_size: int,
    batch_size: int = 8,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[float]:
    """Minus log-probability of each document in nats, summed over all of its tokens.

    start: token before the first of a document; without one that first token counts as a uniform
    guess. batch_size: windows per forward pass, fewer where their logits would take over 1 GiB.
    on_progress: gets (windows done, windows in all). Raises ValueError where the model gives no
    numbers.
    """
    if batch_size < 1:
        raise InputError(f"batch_size must be >= 1; got {batch_size}")
    if start is not None and start >= vocab_size:
        raise InputError(f"end-of-text must be below vocab_size {vocab_size}; got {start}")
    device = device_of(model)
    prefix = torch.tensor([] if start is None else [start], dtype=torch.int32)
    rows = [torch.cat([prefix, ids]) for ids in documents]
    guess = math.log(vocab_size) if start is None else 0.0
    losses = [guess if len(ids) else 0.0 for ids in documents]
    cuts = [(number, *cut) for number, row in enumerate(rows) for cut in windows.over(len(row))]
    cuts.sort(key=lambda cut: cut[1] - cut[3])  # the longest first, so that rows are alike
    size = max(1, min(batch_size, _LOGITS // (windows.context * vocab_size)))
    with evaluating(model), torch.no_grad():
        for at in range(0, len(cuts), size):
            batch = cuts[at : at + size]
            parts = [rows[number][first:end] for number, first, _, end in batch]
            # Padding is on the right, where a causal model never looks, so no mask is needed.
            ids = nn.utils.rnn.pad_sequence([part.long() for part in parts], batch_first=True)
            scores = token_losses(model, ids.to(device)).double().cpu()
            for row, (number, first, scored, end) in zip(scores, batch, strict=True):
                losses[number] += float(row[scored - first - 1 : end - first - 1].sum())
            on_progress(at + len(batch), len(cuts))
    if not all(map(math.isfinite, losses)):
        raise InputError("the model gives log-likelihoods that are not numbers on this text")
    return losses
