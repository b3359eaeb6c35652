"""Losses of a study's arms against what arms differ in: scales, and the size of their routers."""

import math
from collections.abc import Sequence
from itertools import pairwise
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
    spreads = sorted(x for line in figure.data if line.xaxis == "x" for x in line.x)
    ticks = log_ticks(spreads)
    figure.update_xaxes(
        type="log", tickvals=ticks, ticktext=[f"{n:g}" for n in ticks], row=1, col=1
    )
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
    every = [
        (size, fmean(study.values(arm, "validation_ce")), arm)
        for own in groups.values()
        for size, arm, _ in own
    ]
    named = {arm for *_, arm in every} if len(every) <= _NAMED else unbeaten(every)
    sides = sides_of_names([one for one in every if one[2] in named])
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
            text=[f" {arm}" if arm in named else "" for _, arm, _ in arms],
            hovertext=[arm for _, arm, _ in arms],
            mode="+".join(("lines",) * joined + ("markers", "text")),
            textposition=[sides.get(arm, "middle right") for _, arm, _ in arms],
            line={"color": color, "width": 1.2},
            marker={
                "color": color,
                "size": 9,
                "symbol": _SYMBOLS[counts.index(experts) % len(_SYMBOLS)],
            },
            name=router if len(counts) == 1 else f"{router}, {experts} experts",
        )
    ticks = log_ticks(sorted(all_sizes))
    figure.update_xaxes(tickvals=ticks, ticktext=[f"{round(n):,}" for n in ticks])
    low, high = math.log10(min(all_sizes)), math.log10(max(all_sizes))
    wide = high - low
    figure.update_xaxes(range=[low - 0.08 * wide, high + 0.3 * wide])  # the last name has room
    figure.update_xaxes(type="log", title_text="router parameters of the model")
    figure.update_yaxes(title_text=f"{METRICS['validation_ce']}, nats")
    legend = {"orientation": "h", "y": -0.25, "x": 0, "yanchor": "top"}
    margin = {"l": 60, "r": 10, "t": 15, "b": 60}
    figure.update_layout(
        **layout(wide=380, height=400 + 20 * len(groups), legend=legend, margin=margin)
    )
    return figure


def unbeaten(arms: Sequence[tuple[float, float, str]]) -> set[str]:
    """Name the arms of which no other has both a smaller router and a lower loss."""
    best, names = math.inf, set()
    for _, loss, arm in sorted(arms):
        if loss < best:
            best = loss
            names.add(arm)
    return names


def sides_of_names(arms: Sequence[tuple[float, float, str]]) -> dict[str, str]:
    """Put names of near neighbors above and below their dots; of others nothing is said."""
    losses = [loss for _, loss, _ in arms]
    near, sides = 0.06 * (max(losses) - min(losses)), dict[str, str]()
    by_loss = sorted(arms, key=lambda one: one[1])
    for (size, loss, arm), (other_size, other_loss, other) in pairwise(by_loss):
        if other_loss - loss <= near and abs(math.log(size / other_size)) < 0.5:
            sides |= {arm: sides.get(arm, "bottom right"), other: "top right"}
    return sides


def log_ticks(values: Sequence[float]) -> list[float]:
    """Choose at least two ticks of a logarithmic axis over sorted values, where they differ.

    1, 2 and 5 times a power of ten where three of them lie inside; else the values themselves, the
    last one always, as far as no label covers another.
    """
    low, high = max(min(values), 1e-9), max(values)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    round_ones = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    if sum(low <= n <= high for n in round_ones) >= 3:
        return [n for n in round_ones if low / 2 <= n <= 2 * high]
    ticks = [values[-1]]
    for value in reversed(values):
        if value < ticks[-1] / 1.2:
            ticks.append(value)
    if len(ticks) == 1 and low < high:
        ticks.append(low)
    return ticks[::-1]
