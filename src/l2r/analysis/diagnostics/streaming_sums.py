"""Additive statistics of routed tokens, so that metrics stream over batches and over ranks.

Every function returns a dictionary of float64 tensors that add up over tokens: the sums of two
batches are the sums of both together. ``l2r.analysis.diagnostics.metrics`` turns sums into numbers.

Shape letters: T tokens, N experts, K experts chosen per token, R size of a query, H anchors
per expert, G domains.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

Sums = dict[str, Tensor]
Part = TypeVar("Part", str, int)


def margin_sums(logits: Float[Tensor, "T N"], threshold: float) -> Sums:
    """Spread of the logits, and the gap between the two largest, raw and divided by it."""
    margin, scale_free = margins(logits)
    return {
        "tokens": margin.new_tensor(len(margin)),
        "margin": margin.sum(),
        "low_margin": torch.where(margin.isnan(), margin, (margin < threshold).double()).sum(),
        "scale_free_margin": scale_free.sum(),
        "logit_spread": _deviation(logits.double()).sum(),
    }


def margins(logits: Float[Tensor, "T N"]) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Each token's gap between its two largest logits, and that over its logits' deviation."""
    margin, spread = gaps(logits), _deviation(logits.double())
    return margin, torch.where(spread == 0, 0.0, margin / spread)


def gaps(logits: Float[Tensor, "T N"]) -> Float[Tensor, " T"]:
    """Each token's gap between its two largest logits, in float64; 0 for a single expert."""
    top = logits.double().topk(min(2, logits.shape[-1]), dim=-1).values
    return top[:, 0] - top[:, -1]


def _deviation(wide: Float[Tensor, "T N"]) -> Float[Tensor, " T"]:
    """Compute the standard deviation of each token's logits over experts."""
    return (wide - wide.mean(dim=-1, keepdim=True)).square().mean(dim=-1).sqrt()


def usage_sums(
    indices: Int[Tensor, "T K"], weights: Float[Tensor, "T K"], num_experts: int
) -> Sums:
    """Per expert: tokens that chose it first, that chose it at all, and its summed weight."""
    flat, wide = indices.flatten(), weights.double()
    first = indices.gather(1, wide.argmax(dim=1, keepdim=True)).flatten()
    empty = wide.new_zeros(num_experts)
    return {
        "tokens": wide.new_tensor(len(indices)),
        "top1": empty.scatter_add(0, first, torch.ones_like(wide[:, 0])),
        "topk": empty.scatter_add(0, flat, torch.ones_like(wide).flatten()),
        "importance": empty.scatter_add(0, flat, wide.flatten()),
    }


def cosine_sums(vectors: Float[Tensor, "T R"]) -> Sums:
    """First two moments of the unit vectors, which hold every pairwise cosine (memory R^2).

    A zero vector has cosine 0 with everything, so its own |u|^2 is 0 and not 1.
    """
    wide = vectors.double()
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    units = torch.where(norms > 0, wide / norms.clamp_min(1e-300), 0.0)
    own = units.square().sum(dim=-1)
    return {
        "tokens": own.new_tensor(len(own)),
        "unit": units.sum(dim=0),
        "gram": units.T @ units,
        "own": own.sum(),
        "own_squared": own.square().sum(),
    }


BLOCKS = 31  # per domain; prime, so that rows whose domains alternate reach every block


def domain_sums(
    indices: Int[Tensor, "T K"],
    domains: Int[Tensor, " T"],
    rows: Int[Tensor, " T"],
    num_experts: int,
    num_domains: int,
) -> Sums:
    """Count assignments from each domain to each expert: joint [G, N], blocks [G, B, N].

    ``rows`` numbers the sequence or image of each token. Its row modulo B is the token's block,
    so that the counts of a few dozen groups of whole rows are known in bounded memory.
    """
    cell = (domains * BLOCKS + rows % BLOCKS)[:, None] * num_experts + indices
    counts = torch.bincount(cell.flatten(), minlength=num_domains * BLOCKS * num_experts)
    blocks = counts.double().view(num_domains, BLOCKS, num_experts)
    return {"joint": blocks.sum(dim=1), "blocks": blocks}


def anchor_sums(scores: Float[Tensor, "T N H"], indices: Int[Tensor, "T K"]) -> Sums:
    """Count [N, H] how often each anchor is the best of an expert that was chosen."""
    experts, heads = scores.shape[1:]
    chosen = scores.gather(1, indices[:, :, None].expand(-1, -1, heads))
    cell = indices * heads + chosen.argmax(dim=-1)
    counts = torch.bincount(cell.flatten(), minlength=experts * heads)
    return {"anchor_wins": counts.double().view(experts, heads)}


def add(total: Sums, part: Sums) -> None:
    """Add ``part`` to ``total`` in place; names that are new are taken over."""
    for name, value in part.items():
        total[name] = total[name] + value if name in total else value


def all_reduce(parts: Mapping[Part, Sums]) -> dict[Part, Sums]:
    """Sum every part over all ranks, which call this together, in the parts' order.

    A rank that saw no token has no sums, and gets those of the others.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return {part: parts[part] for part in sorted(parts)}
    own = {
        (part, name): (value.shape, value.dtype, value.device.type)
        for part, sums in parts.items()
        for name, value in sums.items()
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    reduced: dict[Part, Sums] = {}
    kinds = {key: kind for rank in every for key, kind in rank.items()}
    for part, name in sorted(kinds):
        shape, dtype, device = kinds[part, name]
        if (part, name) in own:
            total = parts[part][name].clone()
        else:
            total = torch.zeros(shape, dtype=dtype, device=device)
        dist.all_reduce(total)
        reduced.setdefault(part, {})[name] = total
    return reduced
