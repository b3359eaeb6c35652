"""A text of the reader's own on the terminal: a row per token, its first experts by layer."""

from typing import Any

import numpy as np

from l2r.files.arrays import TextRouting
from l2r.files.diagnosis import block_number
from l2r.files.wording import printable
from l2r.report.tables import Table
from l2r.report.verdicts import span

_TOKENS, _LAYERS = 24, 5  # of a terminal
_BEFORE = 4  # tokens of the reader that stand before the first one of the model


def own_text_table(routing: TextRouting, name: str, written: int | None = None) -> Table:
    """First experts of 24 tokens in five layers at most, with the verdict of the text.

    written: position of the first token that the model wrote: those around it are shown, a mark
    stands before it, and the verdict quotes what the model wrote.
    """
    depth = len(routing.layers)
    layers = sorted({round(n * (depth - 1) / (_LAYERS - 1)) for n in range(_LAYERS)})
    first = routing.experts[..., 0].reshape(depth, -1)
    pieces = _pieces(routing)
    columns = ("token", *(f"layer {_number(routing, layer)}" for layer in layers))
    last = max(0, len(pieces) - _TOKENS)
    start = 0 if written is None else min(last, max(0, written - _BEFORE))
    shown = range(start, min(start + _TOKENS, len(pieces)))
    rows = [
        ("▸" * (n == written) + repr(pieces[n])[1:-1], *(int(first[layer, n]) for layer in layers))
        for n in shown
    ]
    used = [len(np.unique(of_layer)) for of_layer in first]
    verdict = (
        f"{name}: the {len(pieces)} tokens go first to {span(used)} of "
        f"{routing.contexts.shape[1]} experts by layer."
    )
    if written is not None:
        verdict += f" It wrote: {printable(''.join(pieces[written:]))}"
    caption = "First experts."
    if written is not None:
        caption += " Text behind ▸ was written by the model."
    if len(rows) < len(pieces):
        caption += f" Tokens {start + 1} to {shown.stop} of {len(pieces)}; all: --json, the page."
    return Table("", columns, tuple(rows), caption, verdict=verdict)


def own_text_records(routing: TextRouting, written: int | None = None) -> list[dict[str, Any]]:
    """Every token with its experts and weights in every layer, for programs.

    written: position of the first token that the model wrote; None where it wrote none.
    """
    depth, k = len(routing.layers), routing.experts.shape[-1]
    experts = routing.experts.reshape(depth, -1, k).swapaxes(0, 1)
    weights = routing.weights.reshape(depth, -1, k).swapaxes(0, 1)
    return [
        {"token": piece, "experts": _chosen(e, e), "weights": _chosen(w, e)}
        | ({} if written is None else {"written": n >= written})
        for n, (piece, e, w) in enumerate(zip(_pieces(routing), experts, weights, strict=True))
    ]


def _chosen(values: np.ndarray, experts: np.ndarray) -> list[list[Any]]:
    """Values of the experts that each layer chose: some choose fewer than others."""
    return [row[own >= 0].tolist() for row, own in zip(values, experts, strict=True)]


def _pieces(routing: TextRouting) -> list[str]:
    columns = routing.margin.shape[2]
    ids = routing.tokens[routing.shown][:, :columns]
    return [str(piece) for piece in routing.pieces[ids.ravel()]]


def _number(routing: TextRouting, layer: int) -> str:
    """Return a layer's number as the model counts blocks; its position if two have the same."""
    blocks = [block_number(str(name)) for name in routing.layers]
    unique = len({*blocks} - {None}) == len(blocks)
    return str(blocks[layer]) if unique else str(layer)
