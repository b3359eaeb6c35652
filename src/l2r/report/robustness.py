"""Certified radii beside the smallest changes that were found."""

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from l2r.report.style import layout, panel_figure, router_color
from l2r.runs.diagnosis import Diagnosis


def certified_curves(views: Mapping[str, Diagnosis]) -> go.Figure:
    """Share of tokens whose decision holds for every change of the input up to a norm.

    A panel per decision (first expert, chosen set); per checkpoint a solid line that is proven
    and a dotted one above it that no change found contradicts: the truth lies between.
    """
    decisions = {"top1": "First expert unchanged", "topk": "Chosen set unchanged"}
    figure, places = panel_figure(list(decisions.values()), len(decisions))
    found = [np.concatenate(v.by_layer(f"found_{d}")) for d in decisions for v in views.values()]
    finite = [radii[np.isfinite(radii)] for radii in found]
    far = max((float(np.quantile(one, 0.98)) for one in finite if one.size), default=1.0)
    noises = sorted({_noise(view) for view in views.values()})
    grid = np.linspace(0, max(far, 1.2 * noises[-1]), 161)
    for place, decision in zip(places, decisions, strict=True):
        for number, (name, view) in enumerate(views.items()):
            for kind, dash in (("certified", "solid"), ("found", "dot")):
                values = np.concatenate(view.by_layer(f"{kind}_{decision}"))
                figure.add_scatter(
                    x=np.round(grid, 4),
                    y=np.round([np.mean(values >= point) for point in grid], 4),
                    mode="lines",
                    line={"dash": dash, "color": router_color(name, number)},
                    name=f"{name}, {kind}",
                    legendgroup=name,
                    showlegend=place["col"] == 1,
                    **place,
                )
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


def _noise(view: Diagnosis) -> float:
    """The usual norm of the stability test's noise, sigma * sqrt(d)."""
    hidden = view.array(0, "sample_x").shape[1]
    return round(float(view.info["settings"]["sigma"] * hidden**0.5), 6)
