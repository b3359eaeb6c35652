"""The first words of a text in the colors of its experts, a column per checkpoint."""

from collections.abc import Mapping

import numpy as np

from l2r.files.arrays import TextRouting
from l2r.files.diagnosis import block_number
from l2r.report.page import Passages
from l2r.report.palette import expert_colors
from l2r.report.text_findings import colors_beside, same_tokens
from l2r.report.text_view import prose_first

_LETTERS = 360  # of a column: about eight lines


def first_passages(texts: Mapping[str, TextRouting]) -> Passages:
    """Color the first words by their first experts in the middle layer.

    All checkpoints that read the same tokens as the first one have a column; theirs have the colors
    of the best matching with its experts.
    """
    ordered = {name: prose_first(routing) for name, routing in texts.items()}
    base = next(iter(ordered.values()))
    return Passages(
        {
            f"{name}, layer {_number(routing, len(routing.layers) // 2)}": _tokens(routing, base)
            for name, routing in ordered.items()
            if routing is base or same_tokens(routing, base)
        }
    )


def _tokens(routing: TextRouting, base: TextRouting) -> list[tuple[str, str, str]]:
    layer, experts = len(routing.layers) // 2, routing.contexts.shape[1]
    most = max(experts, base.contexts.shape[1])
    beside = routing is not base
    place = colors_beside(base, routing, layer) if beside else np.arange(experts)
    colors = expert_colors(most)
    row = routing.tokens[routing.shown[0]][: routing.margin.shape[2]]
    pieces = [str(piece) for piece in routing.pieces[row]]
    ends = np.cumsum([len(piece) for piece in pieces])
    count = int(np.searchsorted(ends, _LETTERS)) + 1
    first = routing.experts[layer, 0, :count, 0].tolist()
    return [
        (piece, colors[int(place[expert])], f"expert {expert}")
        for piece, expert in zip(pieces[:count], first, strict=False)
    ]


def _number(routing: TextRouting, layer: int) -> int:
    block = block_number(str(routing.layers[layer]))
    return layer if block is None else block
