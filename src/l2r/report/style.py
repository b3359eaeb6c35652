"""Layout that every figure shares."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from l2r.report.palette import INK, expert_colors, router_color, stepped


def line_style(name: str, position: int) -> dict[str, Any]:
    """Line of a curve: the color of its router. Dots and dashes are left to chance."""
    return {"color": router_color(name, position), "width": 1.8}


def expert_axis(count: int, title: str, **colorbar: Any) -> dict[str, Any]:
    """Color axis with one flat color per expert, readable at 64 experts and more."""
    ticks = list(range(0, count, max(1, -(-count // 16))))
    return {
        "colorscale": stepped(expert_colors(count)),
        "cmin": -0.5,
        "cmax": count - 0.5,
        "colorbar": {"title": title, "tickvals": ticks, **colorbar},
    }


def panel_figure(titles: Sequence[str], across: int, **options: Any) -> tuple[go.Figure, list[Any]]:
    """Make a figure with a panel per title, ``across`` in a row at most; also each one's place."""
    columns = min(across, len(titles))
    rows = -(-len(titles) // columns)
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=list(titles), **options)
    return figure, [{"row": n // columns + 1, "col": n % columns + 1} for n in range(len(titles))]


def layout(*, wide: int = 0, **changes: Any) -> dict[str, Any]:
    """Layout of every figure; ``changes`` are added to it.

    Backgrounds are the page's. ``wide`` are the pixels that the figure needs: a page that is
    narrower scrolls it, so that no label covers another.
    """
    base: dict[str, Any] = {
        "template": "plotly_white",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "margin": {"l": 70, "r": 30, "t": 60, "b": 60},
        "height": 420,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "meta": wide,
    }
    return {**base, **changes}
