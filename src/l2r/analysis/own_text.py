"""Routing of a text of the reader's own, of any length, by the routers of a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from l2r.analysis.diagnostics.data_pass import read
from l2r.analysis.diagnostics.text_routing import TextTrace
from l2r.errors import InputError
from l2r.files.arrays import TextRouting
from l2r.hf.checkpoints import (
    FLOAT32,
    Placement,
    is_image_classifier,
    load_causal_lm,
    local_checkpoint,
    token_ids,
)
from l2r.routers.offload import device_of

DOMAIN = "your text"


def route_text(
    checkpoint: str | Path,
    text: str,
    *,
    generate: int = 0,
    seed: int = 0,
    placement: Placement = FLOAT32,
    revision: str | None = None,
    trust_remote_code: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> TextRouting:
    """Routing of every token of ``text``, one token long or a book; nothing else is measured.

    ``checkpoint`` is a folder, a run folder or a hub id with its ``revision``. Text that is longer
    than the model's context is cut into passages of equal length; ``say`` gets a
    line about them, and one of what was read.

    generate: up to so many tokens follow, written by the model as its own ``generate`` writes them
    (by the checkpoint's generation config, sampled from ``seed`` where that samples); their routes
    are those of one pass over the whole text.

    Raises ValueError for an image classifier, a checkpoint without a tokenizer, empty text, and
    text that leaves no room in the context for what is to be written.
    """
    folder = local_checkpoint(str(checkpoint), revision=revision, code=trust_remote_code)
    if is_image_classifier(folder):
        raise InputError(f"text is for language models; {checkpoint} classifies images")
    model, tokenizer = load_causal_lm(
        folder, placement=placement, trust_remote_code=trust_remote_code
    )
    if tokenizer is None:
        raise InputError(f"text needs a tokenizer to be read with; {checkpoint} has none")
    ids = token_ids(tokenizer, text)
    if generate:
        check_room(len(ids), generate, model.config)
        ids = _continued(model, ids, generate, seed)
    rows = _passages(ids, model.config, say)
    say(f"read {rows.numel():,} tokens of the text")
    trace = TextTrace(model, domains=(DOMAIN,), tokens=rows.numel())
    device = device_of(model)
    batches = (
        {"input_ids": row[None].to(device), "domain": torch.zeros(1, dtype=torch.int64)}
        for row in rows
    )
    read(model, batches, [trace], run=_run)
    return trace.result(tokenizer)


def passages(tokens: int, config: Any) -> tuple[int, int]:
    """Count the passages, as few as the model's context allows, and the tokens of each."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or tokens
    count = -(-tokens // context)
    return count, tokens // count


def check_room(tokens: int, generate: int, config: Any) -> None:
    """Raise InputError unless the context holds the text and what follows it."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not tokens:
        raise InputError("text must hold at least one token; got none")
    if context is not None and tokens + generate > context:
        most = max(0, context - tokens)
        raise InputError(
            f"generate must be at most {most}, since the model's context is {context} tokens and "
            f"the text has {tokens}; got {generate}"
        )


def _continued(model: Any, ids: list[int], generate: int, seed: int) -> list[int]:
    """Return the tokens with those that the model writes behind them, to its end token at most."""
    inputs = torch.tensor([ids], device=device_of(model))
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        written = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=generate
        )
    return [int(token) for token in written[0]]


def _passages(ids: list[int], config: Any, say: Callable[[str], object]) -> Tensor:
    """Rows [B, S] of tokens, as few as the context allows; a rest of less than B is left out."""
    if not ids:
        raise InputError("text must hold at least one token; got none")
    count, length = passages(len(ids), config)
    left = len(ids) - count * length
    if count > 1:
        rest = f"; the last {left} are left out" if left else ""
        say(
            f"{len(ids)} tokens in {count} passages of {length}, the model's context being "
            f"{config.get_text_config().max_position_embeddings}{rest}"
        )
    return torch.tensor(ids[: count * length]).reshape(count, length)


def _run(model: Any, inputs: dict[str, Tensor]) -> Any:
    return model(input_ids=inputs["input_ids"], use_cache=False)
