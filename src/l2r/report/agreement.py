"""Figures of routers beside each other: two of different runs, or one over its training."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from l2r.report.style import layout, panel_figure
from l2r.runs.agreement import agree
from l2r.runs.diagnosis import Diagnosis


def agreement_heatmaps(views: Mapping[str, Diagnosis]) -> go.Figure | None:
    """Agreement of every two checkpoints, mean over layers; None unless they read the same."""
    names, every = list(views), list(views.values())
    grids = np.full((3, len(names), len(names)), np.nan)
    for a in range(len(names)):
        for b in range(a):
            found = agree(every[a], every[b])
            if found:
                grids[:, a, b] = grids[:, b, a] = np.mean(found, axis=0)
    if np.isnan(grids).all():
        return None
    titles = [
        "Adjusted mutual information<br>(0: chance, 1: the same up to names)",
        "Same first expert<br>under the best matching",
        "The latter by chance<br>(documents or images dealt anew)",
    ]
    figure, places = panel_figure(titles, 3, horizontal_spacing=0.12, shared_yaxes=True)
    for place, grid in zip(places, grids, strict=True):
        shown = [["" if np.isnan(v) else f"{v:.2f}" for v in row] for row in grid]
        figure.add_heatmap(
            z=grid, x=names, y=names, text=shown, texttemplate="%{text}", coloraxis="coloraxis",
            hovertemplate="%{x} and %{y}: %{z:.4f}<extra></extra>", **place,
        )  # fmt: skip
        figure.update_yaxes(autorange="reversed", **place)
    figure.update_annotations(font_size=12)
    colors = {"colorscale": "Blues", "cmin": 0, "cmax": 1, "colorbar": {"title": "share"}}
    text = "Agreement of routers on the same tokens, mean over layers"
    figure.update_layout(
        **layout(height=260 + 34 * len(names), title=text, coloraxis=colors,
                 margin={"l": 90, "t": 110, "b": 80})
    )  # fmt: skip
    return figure


def saturation_curves(over_time: Mapping[str, Any]) -> go.Figure:
    """Router saturation: overlap of each checkpoint's choices with the last one's, by layer."""
    titles = {"top1": "First expert", "topk": "All k experts"}
    figure, places = panel_figure(list(titles.values()), 2)
    x = over_time["checkpoints"]
    depth = len(over_time["top1"][0])
    colors = sample_colorscale("Viridis", np.linspace(0, 0.9, depth).tolist())
    for place, field in zip(places, titles, strict=True):
        for layer, values in enumerate(zip(*over_time[field], strict=True)):
            figure.add_scatter(
                x=x,
                y=values,
                mode="lines+markers",
                line={"color": colors[layer]},
                name=f"layer {layer}",
                legendgroup=str(layer),
                showlegend=field == "top1",
                **place,
            )
        by_chance = over_time.get(f"{field}_by_chance")
        if by_chance:
            figure.add_hline(
                y=float(np.mean(by_chance)),
                line_dash="dot",
                annotation_text="by chance, mean of layers",
                annotation_position="bottom right",
                **place,
            )
        figure.update_xaxes(title_text="step" if isinstance(x[0], int) else "checkpoint", **place)
        figure.update_yaxes(title_text="share that the last checkpoint shares", range=[0, 1.05],
                            **place)  # fmt: skip
    figure.update_layout(
        **layout(height=440, title="Router saturation on the same tokens", margin={"t": 90})
    )
    return figure
