"""Figures of runs side by side: use of experts by layer and by domain, robustness, routing gain."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from l2r.files.diagnosis import Array, Diagnosis
from l2r.report.palette import INK, router_color
from l2r.report.style import layout, panel_figure

# Blue below an even share, white at 1, red above; the scale runs from 0 to 3.
_AROUND_ONE = [
    [0, "#053061"],
    [1 / 6, "#4393c3"],
    [1 / 3, "#f7f7f7"],
    [2 / 3, "#d6604d"],
    [1, "#67001f"],
]

_DOMAINS = 16  # an image model's classes may be thousands
USAGE_TITLES = {
    "top1": "Top-1 frequency",
    "topk": "Top-k frequency",
    "importance": "Importance (mean routing weight)",
}


def usage_by_layer(views: Mapping[str, Diagnosis], kind: str) -> go.Figure:
    """Layer x expert heatmap per run; 1 is the layer's mean over experts."""
    grids = {name: _relative(view.by_layer(kind)) for name, view in views.items()}
    labels = {n: [v.label(i) for i in range(len(v.layers))] for n, v in views.items()}
    return _heatmaps(grids, labels, USAGE_TITLES[kind], "layer")


def usage_of_each(views: Mapping[str, Diagnosis]) -> go.Figure:
    """Draw a row per run: top-1 and top-k frequency and importance, layer x expert."""
    grids, labels = {}, {}
    for name, view in views.items():
        for kind, title in USAGE_TITLES.items():
            panel = f"{name}: {title.partition(' (')[0]}"
            grids[panel] = _relative(view.by_layer(kind))
            labels[panel] = [view.label(i) for i in range(len(view.layers))]
    return _heatmaps(grids, labels, "Expert usage", "layer")


def drawn_domains(view: Diagnosis) -> list[int]:
    """Positions of the domains that figures show: all, or the 16 with the most tokens."""
    tokens = view.array(0, "usage_by_domain").sum(1)[: len(view.info["domains"])]
    return sorted(np.argsort(-tokens, kind="stable")[:_DOMAINS].tolist())


def usage_by_domain(views: Mapping[str, Diagnosis]) -> go.Figure:
    """Domain x expert heatmaps of the first, middle and last layer, a panel per run."""
    grids, labels = {}, {}
    for name, view in views.items():
        layers, drawn = view.few_layers(), drawn_domains(view)
        domains = [view.info["domains"][place] for place in drawn]
        counts = [view.array(layer, "usage_by_domain")[drawn] for layer in layers]
        grids[name] = _relative([row for of_layer in counts for row in of_layer])
        labels[name] = [f"{view.label(i)} · {domain}" for i in layers for domain in domains]
    return _heatmaps(grids, labels, "Top-k use by domain", "layer · domain")


def robustness_bars(views: Mapping[str, Diagnosis]) -> go.Figure:
    """Margin / spread, Stability and Top-k Overlap of every run, with intervals.

    Without the raw margins, whose unit is that of each scoring.
    """
    fields = {
        "scale_free_margin": "Margin / spread",
        "stability": "Stability",
        "topk_overlap": "Top-k overlap",
    }
    return _bars(views, fields, "Robustness, means over layers")


def gain_bars(views: Mapping[str, Diagnosis]) -> go.Figure:
    """Routing gain: how much cross-entropy rises with other experts."""
    fields = {
        "routing_gain": "k experts drawn at random (nats)",
        "shuffled_gain": "experts of another token (nats)",
    }
    text = "Routing gain: rise of the cross-entropy with other experts at the same weights"
    return _bars(views, fields, text)


def _bars(views: Mapping[str, Diagnosis], fields: Mapping[str, str], title: str) -> go.Figure:
    """Draw a panel per number, a bar per run; intervals are means over layers of theirs."""
    figure, places = panel_figure(list(fields.values()), len(fields))
    for place, field in zip(places, fields, strict=True):
        values = [view.numbers().get(field) for view in views.values()]
        measured = all(f"{field}_interval" in row for view in views.values() for row in view.layers)
        error = None
        if measured:
            ends = [[row[f"{field}_interval"] for row in view.layers] for view in views.values()]
            low, high = np.array([np.mean(layers, axis=0) for layers in ends]).T
            reach = {"array": high - values, "arrayminus": values - low}
            error = {"color": INK, "symmetric": False, **reach}  # theme.css: the page's ink
        figure.add_bar(
            x=list(views),
            y=values,
            error_y=error,
            text=_told_apart(values),
            textposition="outside",
            cliponaxis=False,
            marker_color=[router_color(name, i) for i, name in enumerate(views)],
            showlegend=False,
            **place,
        )
        shown = _reach([v for v in values if v is not None and np.isfinite(v)], error)
        figure.update_yaxes(range=shown, exponentformat="e", **place)
    letters = 10 * max(map(len, fields.values()))  # of a panel's title
    wide = max(70 * len(views) + 60, 200, letters) * len(fields)
    figure.update_layout(**layout(wide=wide, height=380, title=title, margin={"t": 90, "b": 90}))
    return figure


def _reach(values: Sequence[float], error: Mapping[str, Any] | None) -> list[float] | None:
    """Range of an axis with 0, and with room for the number above the highest bar."""
    if not values:
        return None
    up = max(error["array"]) if error else 0.0
    low, high = min(0.0, *values), max(0.0, *values) + up
    room = 0.2 * max(high - low, 1e-9)
    return [low - room * (low < 0), high + room]


def _told_apart(values: Sequence[float | None]) -> list[str]:
    """Numbers above bars: with the digits, three to six, in which those that differ look so."""
    known = {value for value in values if value is not None}
    for digits in range(3, 7):
        texts = {value: f"{value:.{digits}f}" for value in known}
        if len(set(texts.values())) == len(known) and all(
            value == 0 or float(text) for value, text in texts.items()
        ):
            break
    return ["" if value is None else texts[value] for value in values]


def certified_curves(views: Mapping[str, Diagnosis]) -> go.Figure:
    """Share of tokens whose decision holds for every change of the input up to a norm.

    A panel per decision (first expert, chosen set); per checkpoint a thick line that is proven
    and a thin one above it that no change found contradicts: the truth lies between.
    """
    decisions = {"top1": "First expert unchanged", "topk": "Chosen set unchanged"}
    figure, places = panel_figure(list(decisions.values()), len(decisions))
    nearest = [np.concatenate(v.by_layer(f"found_{d}")) for d in decisions for v in views.values()]
    finite = [radii[np.isfinite(radii)] for radii in nearest]
    far = max((float(np.quantile(one, 0.98)) for one in finite if one.size), default=1.0)
    noises = sorted({_noise(view) for view in views.values()})
    grid = np.linspace(0, max(far, 1.2 * noises[-1]), 161)
    for place, decision in zip(places, decisions, strict=True):
        for number, (name, view) in enumerate(views.items()):
            for kind, width in (("certified", 2.4), ("found", 0.9)):
                values = np.concatenate(view.by_layer(f"{kind}_{decision}"))
                figure.add_scatter(
                    x=np.round(grid, 4),
                    y=np.round([np.mean(values >= point) for point in grid], 4),
                    mode="lines",
                    line={"width": width, "color": router_color(name, number)},
                    name=f"{name}, {kind}",
                    legendgroup=name,
                    showlegend=place["col"] == 1,
                    **place,
                )
        for noise in noises:
            figure.add_vline(x=noise, line={"color": INK, "width": 1.2}, **place)
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
    figure.update_layout(**layout(wide=720, height=430, legend=legend))
    return figure


def _relative(grid: Sequence[Array] | Array) -> list[list[float]]:
    """Each row divided by its mean; a row of zeros stays."""
    return [(row / (np.mean(row) or 1)).tolist() for row in grid]


def _heatmaps(
    grids: Mapping[str, list[list[float]]],
    labels: Mapping[str, list[str]],
    title: str,
    y_title: str,
) -> go.Figure:
    columns = min(3, len(grids))
    rows = -(-len(grids) // columns)
    tallest = max(len(grid) for grid in grids.values())
    panel, gap = max(90, 24 * tallest), 95  # pixels; the gap holds ticks and two titles
    area = rows * panel + (rows - 1) * gap
    apart = gap / area if rows > 1 else 0
    figure, places = panel_figure(
        list(grids), columns, horizontal_spacing=0.1, vertical_spacing=apart
    )
    for place, (name, grid) in zip(places, grids.items(), strict=True):
        figure.add_heatmap(
            z=grid,
            y=labels[name],
            coloraxis="coloraxis",
            hovertemplate="%{y}, expert %{x}: %{z:.2f} x mean<extra>" + name + "</extra>",
            **place,
        )
        figure.update_yaxes(autorange="reversed", type="category", **place)
        figure.update_xaxes(title_text="expert", **place)
        if place["col"] == 1:
            figure.update_yaxes(title_text=y_title, **place)
    colors = {
        "colorscale": _AROUND_ONE,
        "cmin": 0,
        "cmax": 3,
        "colorbar": {
            "title": "x mean",
            "tickvals": [0, 1, 2, 3],
            "ticktext": ["0", "1", "2", "3+"],
        },
    }
    text = f"{title}: use of each expert relative to the layer's mean"
    few = {"t": 90, "b": 70}
    figure.update_layout(
        **layout(wide=330 * columns, height=area + 160, title=text, coloraxis=colors, margin=few)
    )
    return figure


def _noise(view: Diagnosis) -> float:
    """Return the usual norm of the stability test's noise, sigma * sqrt(d)."""
    hidden = view.array(0, "sample_x").shape[1]
    return round(float(view.info["settings"]["sigma"] * hidden**0.5), 6)
