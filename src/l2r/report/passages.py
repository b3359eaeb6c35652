"""The first words of a text in the colors of its experts, a column per checkpoint."""

from collections.abc import Mapping, Sequence

import numpy as np

from l2r.files.arrays import TextRouting
from l2r.files.diagnosis import block_number
from l2r.report.page import Passages
from l2r.report.palette import expert_colors
from l2r.report.text_findings import agreement_in, colors_beside, same_tokens
from l2r.report.text_view import prose_first

_LETTERS, _LINE = 360, 40  # of a column, about eight lines; of a line that ends early


def first_passages(texts: Mapping[str, TextRouting], *, most: int = 3) -> Passages:
    """Color the first words by their first experts in the middle layer.

    Of the checkpoints that read the same tokens as the first one, the first ``most`` have a column;
    theirs have the colors of the best matching with its experts.
    """
    ordered = {name: prose_first(routing) for name, routing in texts.items()}
    (of, base), *_ = ordered.items()
    alike = [(n, r) for n, r in ordered.items() if r is base or same_tokens(r, base)]
    shown = alike[:most]
    colors = expert_colors(max(routing.contexts.shape[1] for _, routing in shown))
    columns = {_title(n, r, base, of): _tokens(r, base, colors) for n, r in shown}
    caption = "Color: the expert that a token goes to first, in the middle layer."
    if len(columns) > 1:
        caption += f" One color is one expert of {of} and the expert of another that matches best."
    return Passages(columns, caption)


def _title(name: str, routing: TextRouting, base: TextRouting, of: str) -> str:
    layer = _middle(routing)
    title = f"{name}, layer {_number(routing, layer)}"
    if routing is base:
        return title
    share, chance = agreement_in(base, routing, layer, _middle(base))
    return f"{title}: {100 * share:.0f}% as {of}, {100 * chance:.0f}% by chance"


def _middle(routing: TextRouting) -> int:
    return len(routing.layers) // 2


def _tokens(
    routing: TextRouting, base: TextRouting, colors: Sequence[str]
) -> list[tuple[str, str, str]]:
    layer, place_of = _middle(routing), np.arange(routing.contexts.shape[1])
    if routing is not base:
        place_of = colors_beside(base, routing, layer, _middle(base))
    found: list[tuple[str, str, str]] = []
    for row, place in enumerate(routing.shown.tolist()):
        if found:
            found.append(("\n", "", ""))  # passages of a text do not follow each other
        ids = routing.tokens[place][: routing.margin.shape[2]]
        first = routing.experts[layer, row, :, 0].tolist()
        for piece, expert in zip(routing.pieces[ids].tolist(), first, strict=True):
            if sum(_length(piece) for piece, _, _ in found) >= _LETTERS:
                return found
            found.append((piece, colors[int(place_of[expert])], f"expert {expert}"))
    return found


def _length(piece: str) -> int:
    """Letters of a piece, and those that the rest of a line would have held at each break."""
    return len(piece) + _LINE * piece.count("\n")


def _number(routing: TextRouting, layer: int) -> int | str:
    block = block_number(str(routing.layers[layer]))
    return layer if block is None else block
