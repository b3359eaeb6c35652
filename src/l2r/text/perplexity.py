"""Cross-entropy of a language model on token files, per domain."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from l2r.routers.observe import evaluating
from l2r.routers.temporary import replaced
from l2r.text.rows import ChooseRows, balanced_rows
from l2r.text.tokens import TokenDataset

_NO_TARGET = -100


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    dataset: TokenDataset,
    *,
    batch_size: int = 8,
    max_batches: int | None = None,
    device: torch.device | None = None,
    choose: ChooseRows = balanced_rows,
) -> dict[str, float]:
    """Mean next-token cross-entropy in nats per domain, and ``mean`` over the domains.

    The same instances every time, with ``max_batches`` those that ``choose`` takes: the same number
    of rows from every domain, or ``even_rows``. A domain without a row has no
    mean. The model is in evaluation mode meanwhile.
    """
    count = len(dataset)
    if max_batches is not None:
        count = min(count, max_batches * batch_size)
    chosen = choose(dataset, count)
    sums = dict.fromkeys(dataset.domains, 0.0)
    seen = dict.fromkeys(dataset.domains, 0)
    with evaluating(model):
        for start in range(0, len(chosen), batch_size):
            batch = dataset.rows(chosen[start : start + batch_size])
            losses = token_losses(model, batch["input_ids"].to(device)).mean(dim=1).tolist()
            for domain, loss in zip(batch["domain"].tolist(), losses, strict=True):
                sums[dataset.domains[domain]] += loss
                seen[dataset.domains[domain]] += 1
    result = {domain: sums[domain] / seen[domain] for domain in sums if seen[domain]}
    return {**result, "mean": sum(result.values()) / len(result)}


def token_losses(model: nn.Module, input_ids: Tensor, *, chunk: int | None = None) -> Tensor:
    """Cross-entropy [B, S - 1] of every next token, in fp32.

    With ``chunk``, logits exist for that many tokens at a time and are made again in the backward
    pass. Gradients of the output matrix are then added in another order.
    """
    # the last position predicts nothing; cutting it off would copy the logits, twice
    targets = nn.functional.pad(input_ids[:, 1:], (0, 1), value=_NO_TARGET)
    whole = chunk is None or chunk >= targets.numel()
    with nullcontext() if whole else _losses_for_logits(model, targets, chunk or 1):
        logits: Tensor = model(input_ids=input_ids, use_cache=False).logits
    losses = _cross_entropy(logits.flatten(0, 1), targets.flatten()) if whole else logits
    return losses.view_as(targets)[:, :-1]


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits.float(), targets, reduction="none", ignore_index=_NO_TARGET
    )


@contextmanager
def _losses_for_logits(model: nn.Module, targets: Tensor, chunk: int) -> Iterator[None]:
    """Make the output matrix give losses [B, S] in the forward, where its weights are whole."""
    inner: Any = getattr(model, "module", model)  # of DDP
    head: Any = inner.get_output_embeddings()
    project = head.forward

    def losses(hidden: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(project(hidden), targets)

    def in_chunks(hidden: Tensor) -> Tensor:
        rows = torch.split(hidden.flatten(0, 1), chunk)
        pairs = zip(rows, torch.split(targets.flatten(), chunk), strict=True)
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(losses, *pair, **options) for pair in pairs]).view_as(targets)

    with replaced({(head, "forward"): in_chunks}):
        yield
