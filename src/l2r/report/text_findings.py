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
    most, of, busiest, none = _busiest(routing, layer)
    experts = routing.contexts.shape[1]
    rest = f"{none} of {experts} experts get none" if none else "every expert gets some"
    return f"{most:,} of {of:,} tokens go first to expert {busiest}; {rest}."


def _busiest(routing: TextRouting, layer: int) -> tuple[int, int, int, int]:
    """Tokens of the busiest expert, all tokens, its number, and how many experts have no token."""
    first = _first(routing, layer)
    counts = np.bincount(first, minlength=routing.contexts.shape[1])
    return int(counts.max()), len(first), int(counts.argmax()), int((counts == 0).sum())


def headline(texts: Mapping[str, TextRouting]) -> str:
    """Say what a page shows first: two checkpoints' agreement, or one's most crowded layer."""
    (name, routing), *others = texts.items()
    alike = {
        other: agreement(routing, text) for other, text in others if same_tokens(routing, text)
    }
    if alike:
        said = [
            f"{other} sends {100 * share:.0f}% of the tokens to the experts that match {name}'s "
            f"({100 * chance:.0f}% by chance)"
            for other, (share, chance) in alike.items()
        ]
        return f"{'; '.join(said)}."
    crowd = [_busiest(routing, n)[0] for n in range(len(routing.layers))]
    layer = int(np.argmax(crowd))
    most, of, busiest, none = _busiest(routing, layer)
    block = block_number(str(routing.layers[layer]))
    rest = f"; {none} of its {routing.contexts.shape[1]} experts get none" * bool(none)
    return (
        f"{name} sends {most:,} of {of:,} tokens first to expert {busiest} in its most crowded "
        f"layer, {layer if block is None else block}{rest}."
    )


def limits(texts: Mapping[str, TextRouting]) -> str:
    """Say what the colors of a text do not show."""
    parts = ["Whether the routing is good. The colors are of the first expert of each token alone"]
    base, *others = texts.values()
    if any(same_tokens(base, other) for other in others):
        parts.append(
            "Percentages are means over layers, under the best matching of experts in each; the "
            "fewer the tokens, the larger is chance"
        )
    return f"{'. '.join(parts)}."


def agreement(base: TextRouting, other: TextRouting) -> tuple[float, float]:
    """Share of tokens at partners of the best matching, mean over layers; the same by chance."""
    by_layer = [agreement_in(base, other, layer) for layer in range(len(other.layers))]
    share, chance = np.mean(by_layer, axis=0)
    return float(share), float(chance)


def agreement_in(
    base: TextRouting, other: TextRouting, layer: int, of: int | None = None
) -> tuple[float, float]:
    """Share of tokens at partners of the best matching in a layer; the same by chance.

    ``of``: the layer of ``base`` that is compared, the same one if None. By chance: the second's
    tokens shuffled, which keeps loads alone, and matched again.
    """
    draw = np.random.default_rng(layer)
    first, second = _pair(base, other, layer, of)
    shuffled = [matched(table(first, draw.permuted(second, axis=1))) for _ in range(_SHUFFLES)]
    return matched(table(first, second)), float(np.mean(shuffled))


def colors_beside(
    base: TextRouting, other: TextRouting, layer: int, of: int | None = None
) -> Int[np.ndarray, " N"]:
    """Color of each expert of ``other``: its partner's number in ``base``, or one left over.

    ``of``: the layer of ``base``, the same one if None.
    """
    first, second = _pair(base, other, layer, of)
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


def _pair(
    base: TextRouting, other: TextRouting, layer: int, of: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """First experts [1, T] of the shown tokens, a layer of each; a deeper model meets the last."""
    first = _first(base, min(layer, len(base.layers) - 1) if of is None else of)
    return first[None], _first(other, layer)[None]


def _first(routing: TextRouting, layer: int) -> np.ndarray:
    return routing.experts[layer, ..., 0].ravel()
