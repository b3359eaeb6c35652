"""Figures of what experts are used for, and of routers compared on the same tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from l2r.files.diagnosis import Diagnosis, agree
from l2r.report.palette import DOMAINS, INK, layer_colors
from l2r.report.routing import drawn_domains
from l2r.report.style import layout, line_style, panel_figure

# number of a layer -> title and axis of its panel
_PANELS = {
    "domain_specialization": ("Domain: largest share", "share of a domain's tokens"),
    "vocabulary_input": ("Vocabulary: the token itself", "share of a word's tokens"),
    "vocabulary_next": ("Vocabulary: the next token", "share of a word's tokens"),
    "vocabulary_predicted": ("Vocabulary: the predicted token", "share of a word's tokens"),
    "coactivation": ("Co-activation: strongest partner", "P(partner | expert)"),
    "path_information": ("Told by the layer before", "bits"),
}


def specialization_by_layer(views: Mapping[str, Diagnosis]) -> go.Figure:
    """Draw a panel per number: lines over layers, chance as a dotted line with its 95% band."""
    names = {name for view in views.values() for layer in view.layers for name in layer}
    fields = [field for field in _PANELS if field in names]
    figure, places = panel_figure([_PANELS[field][0] for field in fields], 3)
    for place, field in zip(places, fields, strict=True):
        for number, (name, view) in enumerate(views.items()):
            line = line_style(name, number)
            positions = range(len(view.layers))
            x = [int(view.label(i)) for i in positions]
            low, high, chance, own = (
                [layer.get(f"{field}{end}") for layer in view.layers]
                for end in ("_by_chance_low", "_by_chance_high", "_by_chance", "")
            )
            known_at = [i for i in positions if low[i] is not None]
            figure.add_scatter(
                x=[x[i] for i in (*known_at, *known_at[::-1])],
                y=[high[i] for i in known_at] + [low[i] for i in known_at[::-1]],
                fill="toself",
                fillcolor=line["color"],
                opacity=0.15,
                mode="none",
                hoverinfo="skip",
                showlegend=False,
                legendgroup=name,
                **place,
            )
            for values, label, dash in ((own, name, "solid"), (chance, "by chance", "dot")):
                figure.add_scatter(
                    x=x,
                    y=values,
                    mode="lines+markers" if label == name else "lines",
                    line={**line, "dash": dash},
                    name=name if label == name else f"{name}, {label}",
                    legendgroup=name,
                    showlegend=field == fields[0],
                    **place,
                )
        figure.update_xaxes(title_text="layer", dtick=_step(views), **place)
        figure.update_yaxes(title_text=_PANELS[field][1], rangemode="tozero", **place)
    rows = places[-1]["row"]
    text = "Specialization by layer; dotted: by chance, with its 95% band"
    legend = {"orientation": "h", "y": -0.3 / rows, "x": 0}
    figure.update_layout(
        **layout(
            wide=330 * min(3, len(fields)),
            height=330 * rows + 120,
            title=text,
            legend=legend,
            margin={"t": 90, "b": 110},
        )
    )
    return figure


def domain_shares(view: Diagnosis, layers: Sequence[int], name: str) -> go.Figure:
    """Share of each domain's tokens that go to each expert, and k / N, a panel per layer.

    Of many domains those of ``drawn_domains``.
    """
    figure, places = panel_figure([f"layer {view.label(layer)}" for layer in layers], 1)
    names = view.info["domains"]
    drawn = drawn_domains(view)
    domains = [names[place] for place in drawn]
    for place, layer in zip(places, layers, strict=True):
        counts = view.array(layer, "usage_by_domain")[drawn]
        top_k = view.array(layer, "topk").sum()
        shares = top_k * counts / np.maximum(counts.sum(1, keepdims=True), 1)
        for domain, color, share in zip(domains, DOMAINS, shares, strict=False):
            figure.add_bar(
                x=np.arange(len(share)),
                y=np.round(share, 4),
                name=domain,
                legendgroup=domain,
                marker_color=color,
                showlegend=layer == layers[0],
                **place,
            )
        figure.add_hline(y=top_k / counts.shape[1], line={"color": INK, "width": 1.5}, **place)
        figure.update_yaxes(title_text="share of tokens", **place)
    figure.update_xaxes(title_text="expert", row=places[-1]["row"], col=1)
    text = f"{name}: share of a domain's tokens that go to each expert; line: k / N, an even use"
    if len(names) > len(domains):
        text += f"<br>{len(domains)} of {len(names)} domains, those with the most tokens"
    legend = {"orientation": "h", "y": -0.28 / len(layers), "x": 0}
    height = 190 * len(layers) + 180
    figure.update_layout(
        **layout(wide=560, height=height, title=text, legend=legend, margin={"t": 90, "b": 90})
    )
    return figure


def coactivation_heatmaps(
    view: Diagnosis, layers: Sequence[int], name: str, most: int = 16
) -> go.Figure:
    """P(E_j | E_i) of the experts with the strongest pairs, a panel per layer."""
    titles = []
    for layer in layers:
        chance = view.layers[layer].get("coactivation_by_chance")
        partner = "" if chance is None else f"<br>strongest partner by chance: {chance:.2f}"
        titles.append(f"{name}, layer {view.label(layer)}{partner}")
    figure, places = panel_figure(titles, len(titles), horizontal_spacing=0.09)
    for place, layer in zip(places, layers, strict=True):
        together = view.array(layer, "coactivation")
        shown = np.sort(np.maximum(together.max(0), together.max(1)).argsort()[::-1][:most])
        labels = [str(expert) for expert in shown]
        figure.add_heatmap(
            z=np.round(together[np.ix_(shown, shown)], 4),
            x=labels,
            y=labels,
            coloraxis="coloraxis",
            hovertemplate="of the tokens of expert %{y}, a share of %{z:.3f} also went to expert "
            "%{x}<extra>" + name + "</extra>",
            **place,
        )
        figure.update_xaxes(type="category", title_text="expert j", **place)
        figure.update_yaxes(type="category", autorange="reversed", **place)
        if place["col"] == 1:
            figure.update_yaxes(title_text="expert i", **place)
    figure.update_annotations(font_size=12)
    colors = {"colorscale": "Reds", "cmin": 0, "cmax": 1, "colorbar": {"title": "P(j | i)"}}
    all_shown = all(len(together) <= most for together in view.by_layer("coactivation"))
    which = "all experts" if all_shown else f"the {most} experts with the strongest pairs"
    text = f"Co-activation P(E_j | E_i) of {which}"
    figure.update_layout(
        **layout(
            wide=330 * len(titles),
            height=480,
            title=text,
            coloraxis=colors,
            margin={"t": 120, "b": 70},
        )
    )
    return figure


def frequency_lines(views: Mapping[str, Diagnosis]) -> go.Figure:
    """Balance of the load and margin from rare words to frequent ones, means over layers."""
    titles = {"Load entropy": "entropy / log N", "Margin / spread": "deviations of the logits"}
    figure, places = panel_figure(list(titles), 2)
    for column, (place, axis) in enumerate(zip(places, titles.values(), strict=True), start=2):
        for number, (name, view) in enumerate(views.items()):
            bins = np.mean(view.by_layer("frequency"), axis=0)
            figure.add_scatter(
                x=bins[:, 1],
                y=bins[:, column],
                mode="lines+markers",
                line=line_style(name, number),
                name=name,
                legendgroup=name,
                showlegend=column == 2,
                **place,
            )
        figure.update_xaxes(title_text="occurrences of the word (log)", type="log", **place)
        figure.update_yaxes(title_text=axis, **place)
    figure.update_layout(
        **layout(wide=760, height=400, title="Dependence on word frequency, mean of layers")
    )
    return figure


def agreement_heatmaps(views: Mapping[str, Diagnosis]) -> go.Figure | None:
    """Agreement of every two checkpoints, mean over layers; None unless they read the same."""
    names, every = list(views), list(views.values())
    grids = np.full((3, len(names), len(names)), np.nan)
    for a in range(len(names)):
        for b in range(a):
            agreements = agree(every[a], every[b])
            if agreements:
                grids[:, a, b] = grids[:, b, a] = np.mean(agreements, axis=0)
    if np.isnan(grids).all():
        return None
    titles = [
        "Adjusted mutual information<br>(0: chance, 1: the same up to names)",
        "Same first expert<br>under the best matching",
        "The latter by chance<br>(documents or images permuted)",
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
        **layout(wide=900, height=260 + 34 * len(names), title=text, coloraxis=colors,
                 margin={"l": 90, "t": 110, "b": 80})
    )  # fmt: skip
    return figure


def saturation_curves(view: Diagnosis, over_time: Mapping[str, Any]) -> go.Figure:
    """Router saturation: overlap of each checkpoint's choices with the last one's, by layer."""
    titles = {"top1": "First expert", "topk": "All k experts"}
    figure, places = panel_figure(list(titles.values()), 2)
    x = over_time["checkpoints"]
    depth = len(over_time["top1"][0])
    colors = layer_colors(depth)
    for place, field in zip(places, titles, strict=True):
        for layer, values in enumerate(zip(*over_time[field], strict=True)):
            figure.add_scatter(
                x=x,
                y=values,
                mode="lines+markers",
                line={"color": colors[layer]},
                name=f"layer {view.label(layer)}",
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
        **layout(
            wide=760, height=440, title="Router saturation on the same tokens", margin={"t": 90}
        )
    )
    return figure


def _step(views: Mapping[str, Diagnosis]) -> int:
    return max(1, max(len(view.layers) for view in views.values()) // 8)
