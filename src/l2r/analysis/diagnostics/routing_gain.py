"""Routing gain: a model's loss with other experts, less its own.

Works on models with routers of ours, swapped or trained, and on Hugging Face MoE models whose
routers return (logits, weights, indices).

Shape letters: T tokens, N experts, K experts chosen per token.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from l2r.analysis.diagnostics.data_pass import DataBatch
from l2r.errors import InputError
from l2r.routers.observe import Hook, evaluating, find_routers, hooked, routed
from l2r.text import token_losses

GAIN_IMAGES = 2048


class RoutingGain(NamedTuple):
    """Mean loss of the model, and how much it rises with other experts and the same weights.

    random: each token gets k random experts. shuffled: it gets the experts of another token
    of its batch, so that their load stays what it is.
    """

    loss: float
    random: float
    shuffled: float

    def numbers(self) -> dict[str, float]:
        """Numbers by their names in a diagnosis."""
        names = ("cross_entropy", "routing_gain", "shuffled_gain")
        return dict(zip(names, self, strict=True))


@torch.no_grad()
def measure_routing_gain(
    model: nn.Module,
    batches: Iterable[DataBatch],
    loss: Callable[[nn.Module, DataBatch], Tensor],
    *,
    seed: int = 0,
) -> RoutingGain:
    """Routing gain of all layers at once; ``loss`` gives the mean loss of a batch.

    Batches count by the next tokens that they predict, those of images by their number. Experts are
    drawn on the CPU from ``seed``, the same on every device; the model is in evaluation mode
    meanwhile. Raises ValueError for a model without routers, for routers that return something
    else, and for no batches.
    """
    generator = torch.Generator().manual_seed(seed)
    routers = find_routers(model).values()
    sums, total = [0.0, 0.0, 0.0], 0
    with evaluating(model):
        for batch in batches:
            count = _predictions(batch)
            total += count
            sums[0] += count * float(loss(model, batch))
            for i, instead in enumerate(("random", "shuffled"), start=1):
                hook = _replacing(instead, generator)
                with hooked(dict.fromkeys(routers, hook)):
                    sums[i] += count * float(loss(model, batch))
    if not total:
        raise InputError("a routing gain needs at least 1 batch; got 0")
    own, random, shuffled = (each / total for each in sums)
    return RoutingGain(own, random - own, shuffled - own)


def _predictions(batch: DataBatch) -> int:
    """Next tokens that a batch of text predicts, or its images."""
    ids = batch.get("input_ids")
    return len(next(iter(batch.values()))) if ids is None else ids[:, 1:].numel()


def batch_loss(model: nn.Module, batch: DataBatch) -> Tensor:
    """Mean cross-entropy of the next tokens, or of images' ``targets``, in nats."""
    if "input_ids" in batch:
        return token_losses(model, batch["input_ids"]).mean()
    logits: Tensor = model(pixel_values=batch["pixel_values"]).logits
    return nn.functional.cross_entropy(logits.float(), batch["targets"])


def sample_evenly(
    batches: Iterable[DataBatch], items: int, rows: int, size: int
) -> list[DataBatch]:
    """Take ``rows`` of the ``items`` rows in batches, evenly, in new batches of at most ``size``.

    Each new batch is from all over the data. ``rows`` counts sequences, which have a loss per
    token; of images, with one, at least GAIN_IMAGES.
    """
    start = 0
    kept: dict[str, list[Tensor]] = {}
    for batch in batches:
        every = -(-items // (max(rows, GAIN_IMAGES) if "pixel_values" in batch else rows))
        first = -start % every
        start += len(next(iter(batch.values())))
        for name, value in batch.items():
            kept.setdefault(name, []).append(value[first::every])
    whole = {name: torch.cat(parts) for name, parts in kept.items()}
    count = -(-len(next(iter(whole.values()))) // size)
    return [{name: value[i::count] for name, value in whole.items()} for i in range(count)]


def other_experts(
    indices: Int[Tensor, "T K"], num_experts: int, instead: str, generator: torch.Generator
) -> Int[Tensor, "T K"]:
    """K different experts for every token: random, or those of another token."""
    tokens, k = indices.shape
    if instead == "shuffled":
        return indices[torch.randperm(tokens, generator=generator).to(indices.device)]
    drawn = torch.rand(tokens, num_experts, generator=generator).topk(k, dim=1).indices
    return drawn.to(indices)


def _replacing(instead: str, generator: torch.Generator) -> Hook:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        logits, weights, indices = routed(module, output)
        found = (logits, weights, other_experts(indices, logits.shape[1], instead, generator))
        return type(output)(*found) if hasattr(output, "_fields") else found

    return hook
