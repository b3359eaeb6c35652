"""The loss of a sweep against the setting that it swept: one figure and its table."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from l2r.report.page import Key
from l2r.report.palette import INK
from l2r.report.style import layout, line_style
from l2r.report.tables import Table
from l2r.stats.intervals import Interval
from l2r_lab.report.ablation import Row, field_name, phrase
from l2r_lab.report.verdicts import JudgedValues, differences_from_first


def swept_figure(rows: Sequence[Row], judged: JudgedValues) -> list[Any]:
    """Figure and key: a point per cell over the setting with most values, a line per other choice.

    Bars are the interval of a cell's paired difference from the first cell, around its own value;
    the level of the first cell is a line.
    """
    rows = [row for row in rows if row.label in judged.finite]
    fields = dict.fromkeys(field for row in rows for field in row.settings)
    if len(rows) < 2 or not fields:
        return []
    field = max(fields, key=lambda name: len({str(row.settings.get(name)) for row in rows}))
    means = {row.label: fmean(judged.finite[row.label]) for row in rows}
    halves = _halves(judged)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        rest = {name: value for name, value in row.settings.items() if name != field}
        groups.setdefault(", ".join(phrase(*one) for one in rest.items()), []).append(row)
    figure = go.Figure()
    for number, (name, own) in enumerate(groups.items()):
        values = [row.settings.get(field, "none") for row in own]
        numeric = len(own) > 1 and all(isinstance(value, int | float) for value in values)
        figure.add_scatter(
            x=[str(value) for value in values],
            y=[means[row.label] for row in own],
            error_y={"type": "data", "array": [halves.get(row.label, 0.0) for row in own]},
            text=[f" {means[row.label]:.{judged.digits}f}" for row in own],
            textposition=["top right"] * (len(own) - 1) + ["top left"],  # the last has no room
            mode=("lines+" if numeric else "")
            + ("markers+text" if len(groups) == 1 else "markers"),
            line=line_style(name or judged.name, number),
            marker={"size": 9},
            name=name,
            showlegend=len(groups) > 1,
            hovertext=[row.label for row in own],
        )
    base = next(iter(judged.finite))
    if halves:
        figure.add_hline(y=means[base], line={"color": INK, "width": 1.5})
    values = [row.settings.get(field, "none") for row in rows]
    order = sorted({str(value): value for value in values}.values(), key=_place)  # lists, too
    figure.update_xaxes(type="category", title_text=field_name(field))
    figure.update_xaxes(categoryorder="array", categoryarray=[str(value) for value in order])
    figure.update_xaxes(range=[-0.4, len(order) - 0.6])
    unit = ", nats" if judged.less else ""
    better = "lower" if judged.less else "higher"
    figure.update_yaxes(title_text=f"{judged.name}{unit} ({better} is better)")
    legend = {"orientation": "h", "y": -0.25, "x": 0, "yanchor": "top"}
    margin = {"l": 65, "r": 15, "t": 15, "b": 55}
    figure.update_layout(**layout(height=400, legend=legend, margin=margin))
    color = figure.data[0].line.color
    return [figure, _key(base, len(judged.finite[base]), color)] if halves else [figure]


def swept_table(rows: Sequence[Row], judged: JudgedValues) -> Table:
    """List every cell: its mean and, over several seeds, its paired difference from the first."""
    base = next(iter(judged.finite), "")
    differences = _differences(judged)
    cells = []
    for row in rows:
        if row.label not in judged.finite:
            continue
        mean = f"{fmean(judged.finite[row.label]):.{judged.digits}f}"
        gap = differences.get(row.label)
        shown = "-" if gap is None else _interval(gap, judged.digits)
        cells.append((row.label, row.router_parameters, mean, *([shown] if differences else [])))
    columns = ["cell", "router parameters", judged.name]
    columns += [f"difference from {base} [95%]"] if differences else []
    return Table("", tuple(columns), tuple(cells), caption=_about(judged) if differences else "")


def _about(judged: JudgedValues) -> str:
    others = len(judged.finite) - 1
    over = f" over all {others} differences (Bonferroni)" if others > 1 else ""
    return f"Differences are paired by seed; 95%{over}, by Student's t."


def _differences(judged: JudgedValues) -> Mapping[str, Interval]:
    values = judged.finite
    several = len(values) > 1 and len(next(iter(values.values()))) > 1
    return differences_from_first(values) if several else {}


def _halves(judged: JudgedValues) -> dict[str, float]:
    found = {arm: gap.half for arm, gap in _differences(judged).items()}
    return {arm: half for arm, half in found.items() if math.isfinite(half)}


def _interval(gap: Interval, digits: int) -> str:
    return f"{gap.mean:+.{digits}f} [{gap.low:+.{digits}f}, {gap.high:+.{digits}f}]"


def _key(base: str, seeds: int, color: str) -> Key:
    level = f"level of {base}; a cell whose bar leaves it out differs"
    bar = f"95% interval of the difference from {base}, paired over {seeds} seeds"
    return Key(((INK, level, "line"), (color, bar, "line")))


def _place(value: Any) -> tuple[bool, float, str]:
    """Order numbers by size, before words."""
    number = isinstance(value, int | float)
    return (not number, float(value) if number else 0.0, str(value))
