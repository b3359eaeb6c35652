"""Text as the routers see it: one page without a server, text_view.html with its script and style.

Arrays go into the page as base64 of little-endian bytes, a layer at a time, so that the page reads
what it shows and no more. Weights are rounded to 65,535 steps of the layer's largest; all other
numbers are kept as they are.
"""

import base64
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from l2r.files.arrays import TextRouting
from l2r.report.page import Link, Section, write_script_page
from l2r.report.palette import expert_colors, ink_on
from l2r.report.text_findings import colors_beside, finding, headline, limits, same_tokens

_MAX_CHECKPOINTS = 8  # checkpoints of one page
_BY_TOKEN = ("experts", "weights", "margin", "entropy", "radius")
_KINDS = {
    **dict.fromkeys(("margin", "entropy", "radius", "context_weights"), "<f4"),
    **dict.fromkeys(("contexts", "vocabulary", "vocabulary_counts"), "<i4"),
}


def text_sections(texts: Mapping[str, TextRouting], path: Path) -> list[Section]:
    """Write the text page next to the page ``path``; the section that leads to it, if any."""
    if not texts:
        return []
    shown = dict(list(texts.items())[:_MAX_CHECKPOINTS])
    page = write_text_page(shown, text_page_of(path))
    names = ", ".join(shown)
    more = (
        f" (the first {_MAX_CHECKPOINTS} of {len(texts)})" if len(texts) > _MAX_CHECKPOINTS else ""
    )
    text = (
        f"Held-out text in the colors of its experts, layer by layer, for {names}{more}: point at "
        "a token to see its experts, choose an expert to see what it serves."
    )
    return [Section("Text and experts", text, [Link(page.name, "Open the text")])]


def text_page_of(path: Path) -> Path:
    """Name the text page next to the page ``path``."""
    return path.with_name(f"{path.stem}-text.html")


def write_text_page(
    texts: Mapping[str, TextRouting], path: Path, *, written: Mapping[str, int] | None = None
) -> Path:
    """Write the page of one checkpoint or several, side by side if they read the same tokens.

    written: position of the first token that the model of that name wrote itself.
    """
    title = f"Text and experts: {', '.join(texts)}"
    ordered = {name: prose_first(routing) for name, routing in texts.items()}
    data = page_data(ordered, written)
    return write_script_page(path, "text_view", title=title, data=data)


def prose_first(routing: TextRouting) -> TextRouting:
    """Sort the domains by their share of letters and spaces: code comes last."""
    shares = []
    for domain in range(len(routing.domains)):
        rows = routing.shown[routing.domain[routing.shown] == domain]
        text = "".join(routing.pieces[routing.tokens[rows].ravel()])
        plain = sum(letter.isalpha() or letter == " " for letter in text)
        shares.append(round(plain / max(1, len(text)), 1))
    place = np.argsort([-share for share in shares], kind="stable").argsort()
    order = place[routing.domain[routing.shown].astype(int)].argsort(kind="stable")
    by_token = {n: getattr(routing, n)[:, order] for n in _BY_TOKEN}
    return dataclasses.replace(routing, shown=routing.shown[order], **by_token)


def page_data(
    texts: Mapping[str, TextRouting], written: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Collect the page's data: every distinct text once, and the checkpoints that read it."""
    distinct: list[TextRouting] = []
    checkpoints = []
    base = next(iter(texts.values()))
    for name, routing in texts.items():
        same = [n for n, other in enumerate(distinct) if same_tokens(routing, other)]
        if not same:
            distinct.append(routing)
        text = same[0] if same else len(distinct) - 1
        beside = None if routing is base or not same_tokens(routing, base) else base
        about = {"name": name, "text": text, "written": (written or {}).get(name, -1)}
        checkpoints.append({**about, **_checkpoint(routing, beside)})
    most = max((routing.contexts.shape[1] for routing in texts.values()), default=0)
    colors = [[color, ink_on(color)] for color in expert_colors(most)]
    read = [_text(routing) for routing in distinct]
    return {
        "headline": headline(texts),
        "limits": limits(texts),
        "texts": read,
        "checkpoints": checkpoints,
        "colors": colors,
    }


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


def _checkpoint(routing: TextRouting, beside: TextRouting | None) -> dict[str, Any]:
    experts = routing.contexts.shape[1]
    layers = []
    for layer, name in enumerate(routing.layers.tolist()):
        colors = np.arange(experts) if beside is None else colors_beside(beside, routing, layer)
        chosen = int((routing.experts[layer] >= 0).sum(axis=-1).max(initial=0))
        own = routing.experts[layer][..., :chosen]
        weights = routing.weights[layer][..., :chosen]
        largest = float(weights.max())
        steps = np.round(weights * (65535 / largest)) if largest > 0 else weights
        layers.append(
            {
                "name": name,
                "remark": str(routing.remarks[layer]),
                "finding": finding(routing, layer),
                "colors": colors.tolist(),
                "chosen": chosen,
                "experts": _base64(own, "<u2" if experts > 256 else "u1"),
                "weights": _base64(steps, "<u2"),
                "largest": largest,
                **{n: _base64(getattr(routing, n)[layer], kind) for n, kind in _KINDS.items()},
            }
        )
    return {
        "experts": experts,
        "contexts": routing.contexts.shape[2],
        "vocabulary": routing.vocabulary.shape[2],
        "layers": layers,
    }


def _base64(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values).astype(kind).tobytes()).decode()
