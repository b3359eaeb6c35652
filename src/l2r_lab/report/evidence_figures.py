"""Figures of a study: a forest of contrasts, curves with bands, effects of a screen."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from l2r.report.palette import INK, VERDICT_COLORS
from l2r.report.style import layout, line_style
from l2r.stats.intervals import Interval
from l2r_lab.files.study import Study
from l2r_lab.report.metric_names import METRICS, NATS, SMALL
from l2r_lab.stats.contrasts import Contrast, Judged
from l2r_lab.stats.effects import Effect
from l2r_lab.stats.paired_t import estimate

_ROW, _AXIS = 52, 78  # pixels of a contrast, and of an axis between panels
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


def forest(study: Study, rows: Sequence[Judged], *, untrained: bool = False) -> go.Figure | None:
    """Differences of contrasts in the unit of their metric, a panel per metric; none of no rows.

    A difference stands on the right of 0 where the first arm is the better one. A metric's margin
    is a band. ``untrained`` adds, faint, the same models at step 0.
    """
    by_metric: dict[str, list[Judged]] = {}
    for j in rows:
        if j.seeds > 1 and math.isfinite(j.difference.half):
            by_metric.setdefault(j.contrast.metric, []).append(j)
    if not by_metric:
        return None
    counts = [len(own) for own in by_metric.values()]
    inside = _ROW * sum(counts) + _AXIS * (len(counts) - 1)
    figure = make_subplots(
        rows=len(counts),
        cols=1,
        row_heights=counts,
        vertical_spacing=_AXIS / inside if len(counts) > 1 else 0,
    )
    for row, (metric, own) in enumerate(by_metric.items(), start=1):
        for number, j in enumerate(own):
            if untrained:
                _add_contrast(figure, j, j.untrained, (row, number + 0.18), "step 0")
            _add_contrast(figure, j, j.difference, (row, number), j.verdict)
        place = {"row": row, "col": 1}
        if metric in study.margins:
            ends = {"x0": -study.margins[metric], "x1": study.margins[metric]}
            fill = {"fillcolor": INK, "opacity": 0.2, "line_width": 0, "layer": "below"}
            figure.add_vrect(**ends, **fill, **place)
        figure.add_vline(x=0, line_color=INK, **place)
        figure.update_yaxes(
            tickvals=list(range(len(own))),
            ticktext=[_row_name(j) for j in own],
            range=[len(own) - 0.45, -0.6],
            showgrid=False,
            zeroline=False,
            **place,
        )
        unit = "nats" if metric in NATS else "share"
        title = f"{METRICS.get(metric, metric)}, {unit}<br>\u2190 first worse | first better \u2192"
        oriented = [_oriented(j.contrast, v) for j in own for v in (j.difference, j.untrained)]
        room = _room_for_numbers(oriented if untrained else oriented[::2])
        if metric in study.margins:
            room = [min(room[0], 1.1 * ends["x0"]), max(room[1], 1.1 * ends["x1"])]
        ticks = {"nticks": 6, "tickangle": 0}
        figure.update_xaxes(title_text=title, title_standoff=4, range=room, **ticks, **place)
    margin = {"l": 150, "r": 25, "t": 10, "b": 70}
    figure.update_layout(**layout(height=inside + 80, margin=margin))
    return figure


def _add_contrast(
    figure: go.Figure, j: Judged, value: Interval, place: tuple[int, float], name: str
) -> None:
    """Draw a dot with the 95% interval and, of what was trained, the number."""
    row, height = place
    color, digits = VERDICT_COLORS.get(name, INK), ".1e" if j.contrast.metric in SMALL else ".3f"
    middle, half = _oriented(j.contrast, value).mean, abs(value.half)
    figure.add_scatter(
        x=[middle],
        y=[height],
        error_x={"type": "data", "array": [half]},
        mode="markers",
        marker={"color": color, "size": 9 if j.contrast.primary else 6},
        opacity=0.6 if name == "step 0" else 1.0,
        name=name,
        hovertext=f"{name}: {value.mean:+.4f} [{value.low:+.4f}, {value.high:+.4f}], first - second"
        f"<br>{escape(in_words(j.contrast))}",
        hoverinfo="text",
        showlegend=False,
        row=row,
        col=1,
    )
    if name != "step 0" and math.isfinite(half):
        size = f"{abs(middle):{digits}}"  # the side of 0 says better or worse
        _number(figure, size, middle + half, height, color, row=row, col=1)


def _number(
    figure: go.Figure, text: str, x: float, y: float | str, color: str, **place: int
) -> None:
    """Write a number right of its interval."""
    beside = {"xanchor": "left", "xshift": 5, "showarrow": False}
    figure.add_annotation(text=text, x=x, y=y, font={"color": color}, **beside, **place)


def _room_for_numbers(intervals: Sequence[Interval]) -> list[float]:
    """Range of an axis that holds 0, the intervals and a number right of each."""
    ends = [end for value in intervals for end in value[1:] if math.isfinite(end)]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    wide = (high - low) or 1.0
    return [low - 0.04 * wide, high + 0.3 * wide]


def _oriented(contrast: Contrast, value: Interval) -> Interval:
    """Turn a difference so that better is positive."""
    if contrast.better == "larger":
        return value
    return Interval(-value.mean, -value.high, -value.low)


def _row_name(j: Judged) -> str:
    """Pair of arms and, in its color, the verdict."""
    since = f", since {' and '.join(j.contrast.since)}" if j.contrast.since else ""
    lines = wrap(f"{j.contrast.first} vs {j.contrast.second}{since}", 21)
    color = VERDICT_COLORS.get(j.verdict, INK)
    name = "<br>".join(escape(line, quote=False) for line in lines)
    return f"{name}<br><span style='color:{color}'>{j.verdict}</span>"


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


def largest_effects(effects: Sequence[tuple[str, Effect]], most: int = 10) -> go.Figure:
    """Draw effects on the validation loss, largest falls first; the largest in size of many."""
    kept = sorted(effects, key=lambda one: -abs(one[1].change.mean))[:most]
    kept.sort(key=lambda one: one[1].change.mean)
    color = VERDICT_COLORS["equivalent"]
    figure = go.Figure()
    figure.add_scatter(
        x=[effect.change.mean for _, effect in kept],
        y=list(range(len(kept))),
        error_x={"type": "data", "array": [effect.change.half for _, effect in kept]},
        mode="markers",
        marker={"color": color, "size": 8},
        showlegend=False,
    )
    for number, (_, effect) in enumerate(kept):
        change = effect.change
        _number(figure, f"{change.mean:+.3f}", change.high, number, INK)
    figure.add_vline(x=0, line_color=INK)
    names = [
        "<br>".join(wrap(f"{screen}: {effect.factor} {effect.level}", 22))
        for screen, effect in kept
    ]
    figure.update_yaxes(tickvals=list(range(len(kept))), ticktext=names, showgrid=False)
    figure.update_yaxes(zeroline=False, range=[len(kept) - 0.4, -0.6])
    title = "change of the validation CE, nats<br>\u2190 lower is better"
    room = _room_for_numbers([effect.change for _, effect in kept])
    figure.update_xaxes(title_text=title, title_standoff=4, nticks=5, tickangle=0, range=room)
    margin = {"l": 165, "r": 10, "t": 10, "b": 70}
    figure.update_layout(**layout(height=80 + 44 * len(kept), margin=margin))
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
