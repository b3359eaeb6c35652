"""Figures of a study: a forest of contrasts, curves with bands, effects of a screen."""

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from l2r.report.palette import INK, VERDICT_COLORS
from l2r.report.style import layout, line_style
from l2r_lab.files.study import LOSSES, Study
from l2r_lab.report.metric_names import METRICS
from l2r_lab.stats.contrasts import NO_VERDICT, Contrast, Judged
from l2r_lab.stats.effects import Effect
from l2r_lab.stats.paired_t import estimate

_SHOWN = 12  # curves; more are hard to distinguish
_LONG = 24  # characters of an arm's name


def in_words(contrast: Contrast) -> str:
    """Return the paper's claim, or the question that is tested: neither is a result."""
    metric = METRICS.get(contrast.metric, contrast.metric)
    first, second, since = contrast.first, contrast.second, contrast.since
    asked = f"{metric}: is {first} {contrast.better} than {second}?"
    if since is not None:
        asked = f"{metric}: is {first} - {second} {contrast.better} than {since[0]} - {since[1]}?"
    return contrast.text or asked


def forest(study: Study, *, margins: bool = True) -> go.Figure | None:
    """Every contrast and, faint, the same at step 0, toward better on the right.

    ``margins``: contrasts whose metric has a margin, in margins, with the band of the margin;
    otherwise the others, in deviations of their paired differences. None where there are none.
    """
    figure = go.Figure()
    rows = [j for j in study.judged if j.seeds > 1 and _unit(study, j) > 0]
    rows = [j for j in rows if (j.contrast.metric in study.margins) == margins]
    if not rows:
        return None
    for number, j in enumerate(rows):
        unit = _unit(study, j) * (1 if j.contrast.better == "larger" else -1)
        for value, color, opacity, name in (
            (j.untrained, INK, 0.6, "step 0"),
            (
                j.difference,
                VERDICT_COLORS.get(j.verdict, VERDICT_COLORS[NO_VERDICT]),
                1.0,
                j.verdict,
            ),
        ):
            figure.add_scatter(
                x=[value.mean / unit],
                y=[number - 0.15 * (name == "step 0")],
                error_x={"type": "data", "array": [abs(value.half / unit)]},
                mode="markers",
                marker={"color": color, "size": 9 if j.contrast.primary else 6},
                opacity=opacity,
                name=name,
                hovertext=f"{name}: {value.mean:+.4f} [{value.low:+.4f}, {value.high:+.4f}]",
                showlegend=False,
            )
    if margins:
        figure.add_vrect(x0=-1, x1=1, fillcolor=INK, opacity=0.2, line_width=0, layer="below")
    figure.add_vline(x=0, line_color=INK)
    lines = [wrap(in_words(j.contrast), 30) for j in rows]
    row_height = max(42, 17 * max(map(len, lines), default=1))  # pixels: no name overlaps the next
    names = ["<br>".join(of_name) for of_name in lines]
    names = [f"<b>{w}</b>" if j.contrast.primary else w for w, j in zip(names, rows, strict=True)]
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=names)
    figure.update_yaxes(range=[len(rows) - 0.4, -0.6])
    unit_name = _margins_of(study, rows) if margins else "deviations of the paired differences"
    figure.update_xaxes(title_text=f"toward better, in {unit_name}")
    margin = {"l": 215, "r": 15, "t": 20}
    figure.update_layout(**layout(wide=520, height=110 + row_height * len(rows), margin=margin))
    return figure


def arms_of_curves(study: Study) -> list[str]:
    """Arms whose curves are drawn: those that contrasts name, primary ones first, else the best."""
    named = dict.fromkeys(
        arm
        for j in sorted(study.judged, key=lambda j: not j.contrast.primary)
        for arm in (j.contrast.first, j.contrast.second)
    )
    ran = [arm for arm in named or study.arms if study.values(arm, "validation_ce")]
    if not named:
        ran.sort(key=lambda arm: math.fsum(study.values(arm, "validation_ce")[:1]))
    return sorted(ran[:_SHOWN], key=list(study.arms).index)


def curves_with_bands(study: Study) -> go.Figure:
    """Training loss of ``arms_of_curves``, and its gap to the first in the plan's order."""
    shown = arms_of_curves(study)
    long = any(len(arm) > _LONG for arm in shown)  # as those of screens: a line of the legend each
    base_name = "the first" if long else "".join(shown[:1])
    titles = ["Training loss", f"The same less that of {base_name}"]
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles)
    curves = {arm: _by_seed(study, arm) for arm in shown}
    base: dict[int, dict[int, float]] = next(iter(curves.values()), {})
    for position, (arm, seeds) in enumerate(curves.items()):
        gaps = {
            seed: {x: y - base[seed][x] for x, y in curve.items() if x in base[seed]}
            for seed, curve in seeds.items()
            if seed in base
        }
        for column, lines in ((1, seeds), (2, gaps)):
            _band(figure, arm, list(lines.values()), line_style(arm, position), column)
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="nats")
    legend = {"x": 0, "y": -0.2, "yanchor": "top", "orientation": "v" if long else "h"}
    height = 480 + 28 * len(shown) * long
    figure.update_layout(**layout(wide=760, height=height, legend=legend))
    return figure


def effect_plot(screens: Mapping[str, Mapping[str, Sequence[Effect]]]) -> go.Figure:
    """Effects with intervals: a row of panels per screen, a panel per metric that all have."""
    first, *others = screens.values()
    metrics = [metric for metric in first if all(metric in effects for effects in others)]
    figure = make_subplots(
        rows=len(screens),
        cols=len(metrics),
        shared_yaxes=True,
        subplot_titles=[f"{screen}: {METRICS[m]}" for screen in screens for m in metrics],
        vertical_spacing=0.24 / len(screens),
    )
    for row, effects in enumerate(screens.values(), start=1):
        for column, metric in enumerate(metrics, start=1):
            of_metric = effects[metric]
            figure.add_scatter(
                x=[e.change.mean for e in of_metric],
                y=[f"{e.factor} {e.level}" for e in of_metric],
                error_x={"type": "data", "array": [e.change.half for e in of_metric]},
                mode="markers",
                marker={"color": "#0072b2", "size": 8},
                showlegend=False,
                row=row,
                col=column,
            )
            figure.add_vline(x=0, line_color=INK, row=row, col=column)
            figure.update_yaxes(autorange="reversed", row=row, col=column)
    figure.update_xaxes(title_text="change", row=len(screens))
    most = max(len(effects[metrics[0]]) for effects in screens.values())
    figure.update_layout(
        **layout(wide=900, height=len(screens) * (150 + 26 * most), margin={"l": 240})
    )
    return figure


def _margins_of(study: Study, rows: Sequence[Judged]) -> str:
    """Name of the axis' unit: the margin, where all contrasts have one metric."""
    metrics = {j.contrast.metric for j in rows}
    if len(metrics) > 1:
        return "margins of each metric"
    (metric,) = metrics
    return f"margins of {study.margins[metric]:g}{' nats' if metric in LOSSES else ''}"


def _unit(study: Study, j: Judged) -> float:
    return study.margins.get(j.contrast.metric, j.sd)


def _by_seed(study: Study, arm: str) -> dict[int, dict[int, float]]:
    return {r.seed: dict(r.curve) for r in study.results if r.arm == arm}


def _band(
    figure: go.Figure,
    name: str,
    lines: Sequence[Mapping[int, float]],
    style: dict[str, Any],
    column: int,
) -> None:
    """Mean of the lines where all have a point, and its interval."""
    steps = sorted(set.intersection(*(set(line) for line in lines))) if lines else []
    intervals = [estimate([line[step] for line in lines]).interval() for step in steps]
    place = {"row": 1, "col": column}
    if len(lines) > 1:
        figure.add_scatter(
            x=[*steps, *reversed(steps)],
            y=[*(v.high for v in intervals), *(v.low for v in reversed(intervals))],
            fill="toself",
            fillcolor=style["color"],
            opacity=0.15,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=name,
            **place,
        )
    figure.add_scatter(
        x=steps,
        y=[v.mean for v in intervals],
        name=name,
        legendgroup=name,
        showlegend=column == 1,
        mode="lines",
        line=style,
        **place,
    )
