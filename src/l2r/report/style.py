"""Colors and layout that every figure shares."""

import colorsys
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from l2r.runs.router_names import PAPER_ROUTERS

# Color-blind safe hues (Okabe and Ito), one per router, the same in every figure.
_COLORS = ("#52606d", "#56b4e9", "#e69f00", "#cc79a7", "#009e73", "#d55e00")
ROUTER_COLORS = dict(zip(PAPER_ROUTERS, _COLORS, strict=True))
_SPARE = ("#0072b2", "#b8a000", "#000000", "#8b5cf6", "#be185d", "#a16207")
_DASHES = ("solid", "dash", "dot", "dashdot")


def router_color(name: str, position: int = 0) -> str:
    """Color of a router; others take a spare color by their position."""
    return ROUTER_COLORS.get(name, _SPARE[position % len(_SPARE)])


def line_style(name: str, position: int) -> dict[str, Any]:
    """Line of a curve: a router's own color, or a spare one, dashed from the seventh on."""
    dash = "solid" if name in ROUTER_COLORS else _DASHES[position // len(_SPARE) % len(_DASHES)]
    return {"color": router_color(name, position), "width": 1.8, "dash": dash}


def expert_colors(count: int) -> list[str]:
    """Distinct colors for experts: hues around the circle, lightness alternating."""
    colors = []
    for expert in range(count):
        lightness = (0.45, 0.62, 0.34)[expert % 3]
        red, green, blue = colorsys.hls_to_rgb(expert / count, lightness, 0.75)
        colors.append("#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue)))
    return colors


def expert_axis(count: int, title: str, **colorbar: Any) -> dict[str, Any]:
    """Color axis with one flat color per expert, readable at 64 experts and more."""
    scale: list[list[Any]] = []
    for expert, color in enumerate(expert_colors(count)):
        scale += [[expert / count, color], [(expert + 1) / count, color]]
    ticks = list(range(0, count, max(1, -(-count // 16))))
    return {
        "colorscale": scale,
        "cmin": -0.5,
        "cmax": count - 0.5,
        "colorbar": {"title": title, "tickvals": ticks, **colorbar},
    }


def panel_figure(titles: Sequence[str], across: int, **options: Any) -> tuple[go.Figure, list[Any]]:
    """A figure with a panel per title, at most ``across`` in a row, and the place of each."""
    columns = min(across, len(titles))
    rows = -(-len(titles) // columns)
    figure = make_subplots(rows=rows, cols=columns, subplot_titles=list(titles), **options)
    return figure, [{"row": n // columns + 1, "col": n % columns + 1} for n in range(len(titles))]


def layout(**changes: Any) -> dict[str, Any]:
    """Layout of every figure; ``changes`` are added to it."""
    base: dict[str, Any] = {
        "template": "plotly_white",
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 70, "r": 30, "t": 60, "b": 60},
        "height": 420,
    }
    return {**base, **changes}
