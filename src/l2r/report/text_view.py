"""Text as the routers see it: one page without a server, text_view.html with its script and style.

Arrays go into the page as base64 of little-endian bytes, a layer at a time, so that the page reads
what it shows and no more. Weights are rounded to 65,535 steps of the layer's largest; all other
numbers are kept as they are.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from l2r.report.page import Link, Section
from l2r.report.script_page import write_script_page
from l2r.runs.text_routing import TextRouting

_MOST = 8  # checkpoints of one page
_KINDS = {
    **dict.fromkeys(("margin", "entropy", "radius", "context_weights"), "<f4"),
    **dict.fromkeys(("contexts", "vocabulary", "vocabulary_counts"), "<i4"),
}


def text_sections(texts: Mapping[str, TextRouting], path: Path) -> list[Section]:
    """Write the text page beside the page ``path``; the section that leads to it, if any."""
    if not texts:
        return []
    shown = dict(list(texts.items())[:_MOST])
    page = write_text_page(shown, text_page_of(path))
    names = ", ".join(shown)
    more = f" (the first {_MOST} of {len(texts)})" if len(texts) > _MOST else ""
    text = (
        f"Held-out text in the colors of its experts, layer by layer, for {names}{more}: point at "
        "a token to see its experts, choose an expert to see what it serves."
    )
    return [Section("Text and experts", text, [Link(page.name, "Open the text")])]


def text_page_of(path: Path) -> Path:
    """The text page that stands beside the page ``path``."""
    return path.with_name(f"{path.stem}-text.html")


def write_text_page(texts: Mapping[str, TextRouting], path: Path) -> Path:
    """The page of one checkpoint or several, side by side where they read the same tokens."""
    title = f"Text and experts: {', '.join(texts)}"
    return write_script_page(path, "text_view", title=title, data=page_data(texts))


def page_data(texts: Mapping[str, TextRouting]) -> dict[str, Any]:
    """What the script reads: every distinct text once, and the checkpoints that read it."""
    distinct: list[TextRouting] = []
    checkpoints = []
    for name, routing in texts.items():
        same = [n for n, other in enumerate(distinct) if _same_text(routing, other)]
        if not same:
            distinct.append(routing)
        text = same[0] if same else len(distinct) - 1
        checkpoints.append({"name": name, "text": text, **_checkpoint(routing)})
    return {"texts": [_text(routing) for routing in distinct], "checkpoints": checkpoints}


def _same_text(one: TextRouting, other: TextRouting) -> bool:
    fields = ("pieces", "tokens", "domains", "domain", "shown")
    alike = all(np.array_equal(getattr(one, f), getattr(other, f)) for f in fields)
    return alike and one.margin.shape[2] == other.margin.shape[2]


def _text(routing: TextRouting) -> dict[str, Any]:
    return {
        "pieces": routing.pieces.tolist(),
        "tokens": _base64(routing.tokens, "<u4"),
        "length": routing.tokens.shape[1],
        "domains": routing.domains.tolist(),
        "domain": routing.domain.tolist(),
        "shown": routing.shown.tolist(),
        "columns": routing.margin.shape[2],
    }


def _checkpoint(routing: TextRouting) -> dict[str, Any]:
    experts = routing.contexts.shape[1]
    layers = []
    for layer, name in enumerate(routing.layers.tolist()):
        weights = routing.weights[layer]
        largest = float(weights.max())
        steps = np.round(weights * (65535 / largest)) if largest > 0 else weights
        layers.append(
            {
                "name": name,
                "remark": str(routing.remarks[layer]),
                "experts": _base64(routing.experts[layer], "<u2" if experts > 256 else "u1"),
                "weights": _base64(steps, "<u2"),
                "largest": largest,
                **{n: _base64(getattr(routing, n)[layer], kind) for n, kind in _KINDS.items()},
            }
        )
    chosen = routing.experts.shape[-1]
    return {
        "experts": experts,
        "chosen": chosen,
        "contexts": routing.contexts.shape[2],
        "vocabulary": routing.vocabulary.shape[2],
        "layers": layers,
    }


def _base64(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values).astype(kind).tobytes()).decode()
