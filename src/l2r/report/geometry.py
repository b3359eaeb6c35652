"""Figures of routing geometry: PCA scatter plots, the routing plane of rank 2, cosine variance."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots

from l2r.files.diagnosis import Diagnosis
from l2r.report.palette import INK, router_color
from l2r.report.style import expert_axis, layout, panel_figure

_POINTS = 600  # tokens drawn per panel
_ISOTROPIC_2D = 0.5


def principal_axes(
    points: Float[np.ndarray, "S D"],
) -> tuple[Float[np.ndarray, "S 2"], Float[np.ndarray, " 2"]]:
    """Coordinates on the first two principal axes, and their shares of the variance.

    Points of one dimension have 0 on the second axis.
    """
    centerd = np.asarray(points, dtype=np.float64)
    if centerd.shape[1] == 1:
        centerd = np.pad(centerd, ((0, 0), (0, 1)))
    centerd = centerd - centerd.mean(axis=0)
    values, vectors = np.linalg.eigh(centerd.T @ centerd)
    order = values.argsort()[::-1][:2]
    shares = values[order] / max(values.sum(), 1e-300)
    return centerd @ vectors[:, order], shares


Panel = tuple[str, Diagnosis, int, str]  # title, diagnosis, layer, and the space x or q
_SPACES = {"x": "sample_x", "q": "sample_query"}


def pca_scatter(view: Diagnosis, layers: Sequence[int]) -> go.Figure:
    """Tokens of each layer, x above q where it has one; color is the first expert."""
    rows = [
        [(space, view, layer, space) for layer in layers if f"{layer}.{name}" in view.arrays]
        for space, name in _SPACES.items()
    ]
    return pca_panels([row for row in rows if row])


def pca_panels(rows: Sequence[Sequence[Panel]]) -> go.Figure:
    """Draw tokens of a layer in each panel on their two main axes; color is the first expert.

    Axes leave out the outermost percent on each side (scroll or double-click to see it).
    """
    titles = [
        f"{title}, layer {view.label(layer)}" for row in rows for title, view, layer, _ in row
    ]
    columns = max(map(len, rows))
    figure = make_subplots(
        rows=len(rows),
        cols=columns,
        subplot_titles=titles,
        horizontal_spacing=0.08,
        vertical_spacing=0.2 / len(rows),
    )
    experts = 0
    for number, row in enumerate(rows, start=1):
        for column, (_, view, layer, space) in enumerate(row, start=1):
            experts = max(experts, view.info["experts"])
            points = view.array(layer, _SPACES[space])
            finite = np.isfinite(points).all(axis=1)
            flat, shares = principal_axes(points[finite])
            first = view.array(layer, "sample_first")[finite][:_POINTS]
            figure.add_scatter(
                x=_round(flat[:_POINTS, 0]),
                y=_round(flat[:_POINTS, 1]),
                mode="markers",
                marker={
                    "size": 6,
                    "color": first,
                    "coloraxis": "coloraxis",
                    "line": {"width": 0.6, "color": INK},
                },
                hovertemplate="expert %{marker.color}<br>(%{x}, %{y})<extra></extra>",
                showlegend=False,
                row=number,
                col=column,
            )
            names = [f"PC{i + 1} ({share:.0%} of variance)" for i, share in enumerate(shares)]
            place = {"title_standoff": 4, "row": number, "col": column}
            figure.update_xaxes(title_text=names[0], range=_most(flat[:, 0]), **place)
            figure.update_yaxes(title_text=names[1], range=_most(flat[:, 1]), **place)
    bar = expert_axis(experts, "first expert", len=0.9)
    high = 60 + 400 * len(rows)
    figure.update_layout(**layout(wide=340 * columns, height=high, coloraxis=bar))
    return figure


def routing_planes(view: Diagnosis, layers: Sequence[int]) -> go.Figure:
    """Decision regions of rank-2 routers: background first expert, rings anchors, dots tokens."""
    titles = [f"Routing plane, layer {view.label(layer)}" for layer in layers]
    figure, places = panel_figure(titles, len(layers))
    for place, layer in zip(places, layers, strict=True):
        axis, anchors = view.array(layer, "plane_axis"), view.array(layer, "anchors")
        queries = view.array(layer, "sample_query")[:_POINTS]
        first = place["col"] == 1
        figure.add_heatmap(
            x=_round(axis),
            y=_round(axis),
            z=view.array(layer, "plane_first"),
            coloraxis="coloraxis",
            opacity=0.45,
            hovertemplate="first expert %{z}<br>q = (%{x}, %{y})<extra></extra>",
            **place,
        )
        figure.add_scatter(
            x=_round(queries[:, 0]),
            y=_round(queries[:, 1]),
            mode="markers",
            name="tokens",
            marker={"size": 3, "color": INK},
            hoverinfo="skip",
            showlegend=False,
            **place,
        )
        count, heads, _ = anchors.shape
        flat = anchors.reshape(-1, 2)
        expert = np.repeat(np.arange(count), heads)
        figure.add_scatter(
            x=_round(flat[:, 0]),
            y=_round(flat[:, 1]),
            mode="markers",
            name="anchors",
            marker={
                "size": 8,
                "color": expert,
                "coloraxis": "coloraxis",
                "line": {"width": 1, "color": INK},
            },
            customdata=np.stack([expert, np.tile(np.arange(heads), count)], axis=1),
            hovertemplate="expert %{customdata[0]}, anchor %{customdata[1]}<extra></extra>",
            showlegend=False,
            **place,
        )
        reach = float(axis[-1])
        figure.update_xaxes(title_text="q1", range=[-reach, reach], **place)
        figure.update_yaxes(
            title_text="q2" if first else None,
            range=[-reach, reach],
            scaleanchor="x" if first else f"x{place['col']}",
            constrain="domain",
            **place,
        )
    legend = {"orientation": "h", "y": -0.2, "x": 0}
    bar = expert_axis(view.info["experts"], "first expert", len=0.9)
    wide = 340 * len(layers)
    figure.update_layout(**layout(wide=wide, height=440, coloraxis=bar, legend=legend))
    return figure


def cosine_variance_bars(views: Mapping[str, Diagnosis]) -> go.Figure:
    """Variance of pairwise token cosines per checkpoint: bar mean over layers, dots layers."""
    variances = {n: [layer["cosine_variance"] for layer in v.layers] for n, v in views.items()}
    figure = go.Figure()
    names = list(variances)
    means = [float(np.mean(variances[name])) for name in names]
    labels = {name: f"{name}<br>{mean:.3f}" for name, mean in zip(names, means, strict=True)}
    figure.add_bar(
        x=list(labels.values()),
        y=means,
        marker_color=[router_color(name, i) for i, name in enumerate(names)],
        showlegend=False,
    )
    figure.add_scatter(
        x=[labels[name] for name in names for _ in variances[name]],
        y=[value for name in names for value in variances[name]],
        mode="markers",
        marker={"color": "#ffffff", "size": 7, "line": {"color": "#1f2933", "width": 1.4}},
        name="each layer",
    )
    for number, (name, view) in enumerate(views.items()):
        even = _even(view)  # of each space, so that none is measured by another's
        figure.add_scatter(
            x=[labels[name]],
            y=[even],
            mode="markers",
            marker={
                "color": "#ffffff",
                "size": 12,
                "symbol": "diamond",
                "line": {"color": "#1f2933", "width": 1.4},
            },
            name="directions spread evenly in the space of q: 1 / rank",
            legendgroup="even",
            showlegend=number == 0,
            hovertemplate=f"evenly in {round(1 / even)} dimensions: {even:.3f}<extra></extra>",
        )
    top = 1.15 * max(*(max(values) for values in variances.values()), *map(_even, views.values()))
    figure.update_yaxes(title_text="variance of pairwise cosines", range=[0, top])
    legend = {"orientation": "h", "y": 1.16, "x": 0}
    figure.update_layout(**layout(wide=110 * len(views) + 120, height=400, legend=legend))
    return figure


def _even(view: Diagnosis) -> float:
    """Variance of cosines of directions spread evenly in the space where routing is decided."""
    kind = "sample_query" if "0.sample_query" in view.arrays else "sample_x"
    held = f"0.{kind}" in view.arrays
    return 1 / view.array(0, kind).shape[1] if held else _ISOTROPIC_2D


def _most(values: Float[np.ndarray, " S"]) -> list[float]:
    """Axis range of all but a few outliers, which would press the rest into a corner."""
    low, high = np.quantile(values, [0.01, 0.99])
    room = 0.25 * max(high - low, 1e-12)
    return [float(low - room), float(high + room)]


def _round(values: Float[np.ndarray, "..."]) -> list[float]:
    """Four digits are enough on a screen, and keep the page small."""
    return [float(f"{value:.4g}") for value in values]
