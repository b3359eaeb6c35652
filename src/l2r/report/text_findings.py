"""Sentences about the routing of a text: of one layer, of a page, of two checkpoints."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Int

from l2r.files.arrays import TextRouting
from l2r.files.diagnosis import block_number
from l2r.stats.agreement import matched, matching
from l2r.stats.entropy import table

_SHUFFLES = 20  # of the tokens, for the agreement by chance


def finding(routing: TextRouting, layer: int) -> str:
    """Say how many of the shown tokens go first to a layer's busiest expert, and who gets none."""
    first, experts = _first(routing, layer), routing.contexts.shape[1]
    counts = np.bincount(first, minlength=experts)
    busiest, none = int(counts.argmax()), int((counts == 0).sum())
    where = f"{counts[busiest]:,} of {len(first):,} tokens go first to expert {busiest}"
    rest = "every expert is first for some" if none == 0 else f"{none} of {experts} are never first"
    return f"{where}; {rest}."


def headline(texts: Mapping[str, TextRouting]) -> str:
    """Say what a page shows first: two checkpoints' agreement, or one's most crowded layer."""
    (name, routing), *others = texts.items()
    alike = {
        other: agreement(routing, text) for other, text in others if same_tokens(routing, text)
    }
    if alike:
        said = [
            f"{other} sends {100 * share:.0f}% of the tokens to the partners of {name}'s experts "
            f"({100 * chance:.0f}% by chance)"
            for other, (share, chance) in alike.items()
        ]
        return f"Mean over layers, under the best matching of experts: {'; '.join(said)}."
    crowd = [np.bincount(_first(routing, n)).max() for n in range(len(routing.layers))]
    layer = int(np.argmax(crowd))
    block = block_number(str(routing.layers[layer]))
    number = layer if block is None else block
    return f"{name}, in its most crowded layer, {number}: {finding(routing, layer)}"


def agreement(base: TextRouting, other: TextRouting) -> tuple[float, float]:
    """Share of tokens at partners of the best matching, mean over layers; the same by chance.

    By chance: the second's tokens shuffled, which keeps loads alone, and matched again.
    """
    draw = np.random.default_rng(0)
    shares, chances = [], []
    for layer in range(len(other.layers)):
        first, second = _pair(base, other, layer)
        shares.append(matched(table(first, second)))
        shuffled = [matched(table(first, draw.permuted(second, axis=1))) for _ in range(_SHUFFLES)]
        chances.append(np.mean(shuffled))
    return float(np.mean(shares)), float(np.mean(chances))


def colors_beside(base: TextRouting, other: TextRouting, layer: int) -> Int[np.ndarray, " N"]:
    """Color of each expert of ``other``: its partner's number in ``base``, or one left over."""
    first, second = _pair(base, other, layer)
    experts = base.contexts.shape[1], other.contexts.shape[1]
    counts = np.zeros(experts)
    np.add.at(counts, (first, second), 1)
    colors = matching(counts)
    free = iter(sorted(set(range(max(experts))) - set(colors.tolist())))
    return np.array([next(free) if color < 0 else color for color in colors.tolist()])


def same_tokens(one: TextRouting, other: TextRouting) -> bool:
    """Tell whether two checkpoints read the same tokens and the same of them are shown."""
    fields = ("pieces", "tokens", "domains", "domain", "shown")
    alike = all(np.array_equal(getattr(one, f), getattr(other, f)) for f in fields)
    return alike and one.margin.shape[2] == other.margin.shape[2]


def _pair(base: TextRouting, other: TextRouting, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """First experts [1, T] of the shown tokens, a layer of each; a deeper model meets the last."""
    first = _first(base, min(layer, len(base.layers) - 1))
    return first[None], _first(other, layer)[None]


def _first(routing: TextRouting, layer: int) -> np.ndarray:
    return routing.experts[layer, ..., 0].ravel()
