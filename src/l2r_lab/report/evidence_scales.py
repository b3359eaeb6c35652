"""Losses of a study's arms against what arms differ in: scales, and the size of their routers."""

import math
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from l2r.report.palette import router_color
from l2r.report.style import layout, panel_figure
from l2r_lab.files.study import Study
from l2r_lab.report.metric_names import METRICS

_SCALES = ("logit_spread", "weight_sum", "first_experts")
_NAMED = 12  # arms; names of more would cover each other
_SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up")  # by number of experts


def scale_plot(study: Study) -> go.Figure:
    """Loss of every arm of the screens against what routers differ in besides their geometry."""
    figure, places = panel_figure([METRICS[m] for m in _SCALES], 3, shared_yaxes=True)
    for position, (name, screen) in enumerate(study.screens.items()):
        for metric, place in zip(_SCALES, places, strict=True):
            arms = [arm for arm in screen.arms if study.values(arm, metric)]
            figure.add_scatter(
                x=[fmean(study.values(arm, metric)) for arm in arms],
                y=[fmean(study.values(arm, "validation_ce")) for arm in arms],
                text=arms,
                mode="markers",
                marker={"color": router_color(name, position), "size": 8},
                name=name,
                legendgroup=name,
                showlegend=metric == _SCALES[0],
                **place,
            )
    figure.update_xaxes(type="log", row=1, col=1)
    figure.update_yaxes(title_text=f"{METRICS['validation_ce']}, nats", row=1, col=1)
    figure.update_layout(**layout(wide=900, legend={"orientation": "h", "y": -0.2, "x": 0}))
    return figure


def size_plot(study: Study) -> go.Figure | None:
    """Plot validation loss of every arm against its routers' parameters; bars: least to largest.

    A router's arms that differ in rank alone are joined. None where all have as many parameters,
    or results do not say.
    """
    groups: dict[tuple[str, int | None], list[tuple[int, str, dict[str, Any]]]] = {}
    for arm in study.arms:
        size, losses = study.router_parameters(arm), study.values(arm, "validation_ce")
        if size is None or not losses or not all(map(math.isfinite, losses)):
            continue
        recipe = next(r.recipe for r in study.results if r.arm == arm)
        group = (recipe["router"]["kind"], recipe["model"].get("num_experts"))
        besides_rank = {name: value for name, value in recipe["router"].items() if name != "rank"}
        groups.setdefault(group, []).append((size, arm, besides_rank))
    all_sizes = {size for arms in groups.values() for size, *_ in arms}
    if len(all_sizes) < 2:
        return None
    routers = list(dict.fromkeys(router for router, _ in groups))
    counts = list(dict.fromkeys(experts for _, experts in groups))
    few = sum(map(len, groups.values())) <= _NAMED
    figure = go.Figure()
    for (router, experts), arms in groups.items():
        arms.sort(key=lambda values: values[:2])
        sizes = [size for size, *_ in arms]
        by_arm = [study.values(arm, "validation_ce") for _, arm, _ in arms]
        means = [fmean(seeds) for seeds in by_arm]
        above = [max(seeds) - mean for seeds, mean in zip(by_arm, means, strict=True)]
        below = [mean - min(seeds) for seeds, mean in zip(by_arm, means, strict=True)]
        joined = len(arms) > 1 and all(others == arms[0][2] for *_, others in arms)
        color = router_color(router, routers.index(router))
        figure.add_scatter(
            x=sizes,
            y=means,
            error_y={"type": "data", "array": above, "arrayminus": below},
            text=[f" {arm}" for _, arm, _ in arms],
            mode="+".join(("lines",) * joined + ("markers",) + ("text",) * few),
            textposition="middle right",
            line={"color": color, "width": 1.2},
            marker={
                "color": color,
                "size": 9,
                "symbol": _SYMBOLS[counts.index(experts) % len(_SYMBOLS)],
            },
            name=router if len(counts) == 1 else f"{router}, {experts} experts",
        )
    ticks = [digit * 10**power for power in range(12) for digit in (1, 2, 5)]
    ticks = [n for n in ticks if min(all_sizes) / 2 <= n <= 2 * max(all_sizes)]
    if sum(min(all_sizes) <= n <= max(all_sizes) for n in ticks) < 3:
        ticks = []
        for size in sorted(all_sizes):
            if not ticks or size > 1.2 * ticks[-1]:  # so that no label covers another
                ticks.append(size)
    figure.update_xaxes(tickvals=ticks, ticktext=[f"{n:,}" for n in ticks])
    figure.update_xaxes(type="log", title_text="router parameters of the model")
    figure.update_yaxes(title_text=f"{METRICS['validation_ce']}, nats")
    legend = {"orientation": "h", "y": -0.25, "x": 0, "yanchor": "top"}
    figure.update_layout(**layout(wide=520, height=440 + 20 * len(groups), legend=legend))
    return figure
