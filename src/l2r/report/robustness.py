"""Figures of robustness: stability under noise and certified radii."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from l2r.report.style import layout, panel_figure, router_color


@dataclass(frozen=True)
class Radii:
    """Radii of the tokens of one checkpoint [S]: certified, and the smallest flip found.

    noise: the usual norm of the stability test's noise, sigma * sqrt(d).
    """

    certified: Float[np.ndarray, " S"]
    found: Float[np.ndarray, " S"]
    noise: float


def stability_bars(
    values: Mapping[str, Mapping[str, tuple[float, float, float]]], titles: Mapping[str, str]
) -> go.Figure:
    """A panel per metric with (mean, low, high) of every checkpoint."""
    figure, places = panel_figure(list(titles.values()), len(titles))
    for place, field in zip(places, titles, strict=True):
        rows = [values[name][field] for name in values]
        figure.add_bar(
            x=list(values),
            y=[mean for mean, _, _ in rows],
            error_y={
                "array": [high - mean for mean, _, high in rows],
                "arrayminus": [mean - low for mean, low, _ in rows],
            },
            text=[f"{mean:.4f}" for mean, _, _ in rows],
            textposition="inside",
            insidetextanchor="start",
            marker_color=[router_color(name, i) for i, name in enumerate(values)],
            showlegend=False,
            **place,
        )
        figure.update_yaxes(title_text="share", range=[0, 1.05], **place)
    figure.update_layout(**layout(height=360))
    return figure


def certified_curves(panels: Mapping[str, Mapping[str, Radii]]) -> go.Figure:
    """Share of tokens whose decision holds for every change of the input up to a norm.

    A panel per decision (first expert, chosen set); per checkpoint a solid line that is proven
    and a dotted one above it that no change found contradicts: the truth lies between.
    """
    figure, places = panel_figure(list(panels), len(panels))
    finite = [
        radii.found[np.isfinite(radii.found)]
        for group in panels.values()
        for radii in group.values()
    ]
    far = max((float(np.quantile(one, 0.98)) for one in finite if one.size), default=1.0)
    far = max(far, *(1.2 * r.noise for group in panels.values() for r in group.values()))
    grid = np.linspace(0, far, 161)
    for place, group in zip(places, panels.values(), strict=True):
        for number, (name, radii) in enumerate(group.items()):
            for kind, dash, values in (
                ("certified", "solid", radii.certified),
                ("found", "dot", radii.found),
            ):
                figure.add_scatter(
                    x=np.round(grid, 4),
                    y=np.round(_share_above(values, grid), 4),
                    mode="lines",
                    line={"dash": dash, "color": router_color(name, number)},
                    name=f"{name}, {kind}",
                    legendgroup=name,
                    showlegend=place["col"] == 1,
                    **place,
                )
        noises = sorted({round(radii.noise, 6) for radii in group.values()})
        for noise in noises:
            figure.add_vline(x=noise, line_dash="dash", line_color="#52606d", **place)
            figure.add_annotation(
                x=noise,
                y=1.02,
                text="norm of the test noise",
                showarrow=False,
                xanchor="left",
                font={"size": 11},
                **place,
            )
        figure.update_xaxes(title_text="norm of the change of the router input", **place)
        figure.update_yaxes(title_text="share of tokens", range=[0, 1.06], **place)
    legend = {"orientation": "h", "y": -0.25, "x": 0}
    figure.update_layout(**layout(height=430, legend=legend))
    return figure


def _share_above(values: Float[np.ndarray, " S"], grid: Float[np.ndarray, " G"]) -> list[float]:
    return [float(np.mean(values >= point)) for point in grid]
