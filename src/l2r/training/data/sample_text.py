"""A few batches of text in a checkpoint's own tokens: to fit routers on, and to measure on."""

from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from l2r.training.data.corpus import CorpusOptions, split_corpus


def sample_batches(
    tokenizer: Any,
    *,
    corpus: CorpusOptions | None = None,
    tokens: int = 200_000,
    held_out_tokens: int = 50_000,
    sequence_length: int = 256,
    batch_size: int = 8,
) -> tuple[list[Tensor], list[Tensor]]:
    """Batches [B, S] of token ids for fitting, and others from files that are held out.

    ``corpus``: whose text and whose split, the newest embedded one by default; its vocabulary is
    not used. Domains come in turns, in equal parts.
    Raises ValueError when there is too little text for one row, or sizes too small.
    """
    # One token predicts nothing, so a row has two.
    for name, value, least in (
        ("sequence_length", sequence_length, 2),
        ("batch_size", batch_size, 1),
        ("tokens", tokens, 1),
        ("held_out_tokens", held_out_tokens, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be >= {least}; got {value}")
    parts = []
    splits = split_corpus(corpus or CorpusOptions())
    for domains, budget in zip(splits, (tokens, held_out_tokens), strict=True):
        share = max(budget // len(domains), sequence_length)
        rows = [list(packed_rows(tokenizer, t, share, sequence_length)) for t in domains.values()]
        mixed = [row for row in chain.from_iterable(zip_longest(*rows)) if row is not None]
        if not mixed:
            raise ValueError(f"the text must give at least {sequence_length} tokens; got fewer")
        parts.append(list(torch.split(torch.stack(mixed), batch_size)))
    return parts[0], parts[1]


def packed_rows(tokenizer: Any, texts: Iterable[str], budget: int, length: int) -> Iterator[Tensor]:
    """Documents one after another, an end-of-text token after each, cut into rows [``length``].

    At most ``budget`` tokens in all; no more text is read than they take.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    buffer: list[int] = []
    for text in texts:
        # A whole file can be far longer than the budget: four characters a token is generous.
        ids = tokenizer(text[: 8 * budget], add_special_tokens=False, verbose=False)["input_ids"]
        buffer += [*ids, *end]
        while len(buffer) >= length and budget >= length:
            yield torch.tensor(buffer[:length])
            buffer, budget = buffer[length:], budget - length
        if budget < length:
            return
