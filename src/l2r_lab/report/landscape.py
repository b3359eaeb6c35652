"""Score landscapes over the routing plane for a fixed anchor (paper, Figures 3 and 8)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from l2r.report.palette import INK
from l2r.report.style import layout, panel_figure


def landscapes_2d(
    axis: Float[np.ndarray, " G"],
    scores: Mapping[str, Float[np.ndarray, "G G"]],
    anchor: tuple[float, float],
) -> go.Figure:
    """Heatmaps of the score at q = (x, y), with level lines and the anchor marked."""
    figure, places = panel_figure(list(scores), len(scores), horizontal_spacing=0.16)
    for place, (name, grid) in zip(places, scores.items(), strict=True):
        first = place["col"] == 1
        axis_number = "" if first else place["col"]
        right = figure.layout[f"xaxis{axis_number}"].domain[1]
        figure.add_contour(
            x=axis,
            y=axis,
            z=_round(grid),
            colorscale="RdBu_r",
            zmid=0,
            contours={"coloring": "heatmap"},
            ncontours=21,
            line={"width": 0.6, "color": "rgba(31,41,51,0.5)"},
            colorbar={"x": right + 0.01, "len": 0.9, "thickness": 14, "title": "score"},
            hovertemplate="q = (%{x:.2f}, %{y:.2f})<br>score %{z:.3f}<extra>" + name + "</extra>",
            **place,
        )
        figure.add_scatter(
            x=[0, anchor[0]],
            y=[0, anchor[1]],
            mode="lines+markers",
            marker={"size": [0, 11], "symbol": "star", "color": INK},
            line={"color": INK, "width": 2},
            name=f"anchor k = [{anchor[0]:g}, {anchor[1]:g}]",
            showlegend=first,
            **place,
        )
        figure.update_xaxes(title_text="q1", **place)
        figure.update_yaxes(
            title_text="q2", scaleanchor=f"x{axis_number}", constrain="domain", **place
        )
    figure.update_layout(
        **layout(
            wide=340 * len(scores),
            height=500,
            legend={"orientation": "h", "y": -0.16, "x": 0.5, "xanchor": "center"},
        )
    )
    return figure


def landscapes_3d(
    axis: Float[np.ndarray, " G"], scores: Mapping[str, Float[np.ndarray, "G G"]]
) -> go.Figure:
    """Surfaces of the score at q = (x, y), three to a row, each with its own height scale."""
    columns = min(3, len(scores))
    rows = -(-len(scores) // columns)
    surfaces = [[{"type": "surface"}] * columns] * rows
    figure, places = panel_figure(
        list(scores), columns, specs=surfaces, horizontal_spacing=0.02, vertical_spacing=0.06
    )
    for place, (name, grid) in zip(places, scores.items(), strict=True):
        figure.add_surface(
            x=axis,
            y=axis,
            z=_round(grid),
            colorscale="RdBu_r",
            cmid=0,
            showscale=False,
            hovertemplate="q = (%{x:.2f}, %{y:.2f})<br>score %{z:.3f}<extra>" + name + "</extra>",
            **place,
        )
    scene: dict[str, Any] = {
        "xaxis": {"title": {"text": "q1"}, "nticks": 5},
        "yaxis": {"title": {"text": "q2"}, "nticks": 5},
        "zaxis": {"title": {"text": "score"}, "nticks": 6},
        "camera": {"eye": {"x": 1.7, "y": -1.7, "z": 1.0}, "center": {"z": -0.15}},
        "aspectmode": "cube",
    }
    for axis_name in ("xaxis", "yaxis", "zaxis"):
        scene[axis_name] |= {"showbackground": False, "gridcolor": INK, "zerolinecolor": INK}
    figure.update_scenes(scene)
    figure.update_layout(
        **layout(wide=330 * columns, height=430 * rows, margin={"l": 10, "r": 10, "t": 70, "b": 10})
    )
    return figure


def _round(grid: Float[np.ndarray, "G G"]) -> Float[np.ndarray, "G G"]:
    return np.round(grid.astype(np.float64), 4)
