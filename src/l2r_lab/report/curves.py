"""Training curves from metrics.jsonl, one line per run or per group of runs."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from l2r.errors import InputError
from l2r.files.folder import RunFolder
from l2r.report.page import Section
from l2r.report.style import layout, line_style, panel_figure
from l2r.report.tables import Table

# (record kind, field, panel title, axis title)
LANGUAGE_PANELS = (
    ("train_mean", "ce", "Training cross-entropy of every step", "nats per token"),
    ("validation", "ce/mean", "Validation cross-entropy, mean of domains", "nats per token"),
    ("validation", "ce/c4", "C4 validation cross-entropy", "nats per token"),
    ("train", "balance", "Load-balance loss, mean of layers", "L_bal (the paper's: k = balanced)"),
    ("train", "z", "Router z-loss, mean of layers", "L_z"),
    ("tasks", "mmlu", "MMLU accuracy", "share of documents"),
    ("tasks", "hellaswag", "HellaSwag accuracy", "share of documents"),
    ("tasks", "boolq", "BoolQ accuracy", "share of documents"),
    ("tasks", "piqa", "PIQA accuracy", "share of documents"),
    ("tasks", "sciq", "SciQ accuracy", "share of documents"),
)
VISION_PANELS = (
    ("train_mean", "ce", "Training cross-entropy of soft targets", "nats per image"),
    ("validation", "top1", "Validation top-1 accuracy", "share of images"),
    ("validation", "ce", "Validation cross-entropy", "nats per image"),
    ("train", "balance", "Load-balance loss, mean of layers", "L_bal (the paper's: k = balanced)"),
)
HEALTH_PANELS = (
    ("train", "load_entropy", "Load entropy, lowest layer", "share of the largest possible"),
    ("train", "max_over_mean", "Largest load, worst layer", "load of busiest expert / mean"),
    ("train", "dead_experts", "Experts without a token", "experts, all layers"),
    ("train", "grad_norm", "Gradient norm before clipping", "l2 norm"),
)
# Panels of the paper's Figures 4 and 9, in its order.
_DYNAMICS = (
    ("tasks", "mmlu", "MMLU accuracy"),
    ("tasks", "hellaswag", "HellaSwag accuracy"),
    ("validation", "ce/c4", "C4 CE"),
    ("train_mean", "ce", "Train CE"),
    ("train", "balance", "Load-balance loss"),
)
Curve = tuple[list[float], list[float]]  # positions and values
_WORST: dict[str, Callable[..., float]] = {
    "load_entropy": min,
    "max_over_mean": max,
    "dead_experts": sum,
}


def curve_sections(
    title: str,
    text: str,
    groups: Mapping[str, Sequence[RunFolder]],
    panels: Sequence[tuple[str, str, str, str]],
    unit: str,
) -> list[Section]:
    """Return the section of ``curves``; none where no run has a record of any panel.

    What was recorded once is a number in a table and no curve.
    """
    figure = curves(groups, panels, unit)
    parts = [*([figure] if figure.data else []), *_measured_once(groups, panels, unit)]
    return [Section(title, text, parts)] if parts else []


def _measured_once(
    groups: Mapping[str, Sequence[RunFolder]],
    panels: Sequence[tuple[str, str, str, str]],
    unit: str,
) -> list[Table]:
    """Tabulate the panels that ``curves`` leaves out although they have a value."""
    columns, by_panel = list[str](), list[dict[str, float]]()
    for kind, field, title, _ in panels:
        lines = {name: mean_curve(runs, kind, field, unit) for name, runs in groups.items()}
        if max((len(x) for x, _ in lines.values()), default=0) == 1:
            columns.append(title)
            by_panel.append({name: y[0] for name, (x, y) in lines.items() if x})
    rows = [(name, *(values.get(name) for values in by_panel)) for name in groups]
    head = ("run", *columns)
    return [Table("Measured once", head, tuple(rows), digits=3)] if columns else []


def curves(
    groups: Mapping[str, Sequence[RunFolder]],
    panels: Sequence[tuple[str, str, str, str]],
    unit: str,
) -> go.Figure:
    """Make a panel per number, a line per group, against ``unit`` (tokens or images) seen.

    A line is the mean over the runs of its group (repeats with other seeds). Panels are left out
    where no line has two points: a single one is a number, and tables have it.
    """
    lines = {
        panel: {name: mean_curve(runs, *panel[:2], unit) for name, runs in groups.items()}
        for panel in panels
    }
    shown = [panel for panel in panels if any(len(x) > 1 for x, _ in lines[panel].values())]
    if not shown:
        return go.Figure()
    figure, rows = line_panels([(panel[2], panel[3], lines[panel]) for panel in shown], unit)
    for number, line in enumerate(figure.data):
        line.update(legendgroup=line.name, showlegend=number < len(groups))
    legend = {"orientation": "h", "y": 1.0 + 0.22 / rows, "x": 0}
    wide = 380 * min(2, len(shown))
    figure.update_layout(
        **layout(wide=wide, height=360 * rows + 40, legend=legend, margin={"t": 110})
    )
    return figure


def dynamics(groups: Mapping[str, Mapping[str, RunFolder]]) -> go.Figure:
    """Five panels to a row (MMLU, HellaSwag, C4, training loss, balance), a row per group.

    Raises ValueError for a run that lacks a record of one of them.
    """
    titles = [title for _ in groups for _, _, title in _DYNAMICS]
    rows = len(groups)
    figure, places = panel_figure(
        titles, len(_DYNAMICS), vertical_spacing=0.28 / rows, horizontal_spacing=0.065
    )
    for number, (group, runs) in enumerate(groups.items()):
        legend = "legend" if number == 0 else f"legend{number + 1}"
        for position, (name, run) in enumerate(runs.items()):
            for column, (kind, field, title) in enumerate(_DYNAMICS):
                x, y = mean_curve([run], kind, field, "tokens")
                if not x:
                    raise InputError(f"{run.path} has no record of {title} in training")
                figure.add_scatter(
                    x=x,
                    y=y,
                    name=name,
                    legendgroup=f"{group} {name}",
                    showlegend=column == 0,
                    legend=legend,
                    mode="lines+markers" if len(x) < 20 else "lines",
                    line=line_style(name, position),
                    **places[number * len(_DYNAMICS) + column],
                )
        top = figure.layout[f"yaxis{number * len(_DYNAMICS) + 1 if number else ''}"].domain[1]
        place = {"x": 1.01, "y": top, "yanchor": "top", "title": {"text": group}}
        place["font"] = {"size": 12}
        figure.update_layout({legend: place})
    figure.update_xaxes(nticks=4, tickangle=0, tickfont_size=10)
    figure.update_xaxes(title_text="tokens", title_standoff=4, row=rows)
    figure.update_yaxes(nticks=6, tickfont_size=10)
    figure.update_annotations(font_size=13)
    margin = {"l": 60, "r": 170, "t": 60, "b": 50}
    figure.update_layout(**layout(wide=1100, height=240 * rows + 110, margin=margin))
    return figure


def line_panels(
    content: Sequence[tuple[str, str, Mapping[str, Curve]]], unit: str
) -> tuple[go.Figure, int]:
    """Two panels to a row, each with a title, a title of its axis and named lines; and the rows."""
    rows = -(-len(content) // 2)
    titles = [title for title, _, _ in content]
    figure, places = panel_figure(titles, 2, vertical_spacing=0.28 / rows)
    for place, (title, axis, lines) in zip(places, content, strict=True):
        for position, (name, (x, y)) in enumerate(lines.items()):
            figure.add_scatter(
                x=x,
                y=y,
                name=name,
                legendgroup=title,
                mode="lines+markers" if len(x) < 20 else "lines",
                line=line_style(name, position),
                **place,
            )
        figure.update_xaxes(title_text=unit, **place)
        figure.update_yaxes(title_text=axis, **place)
    return figure, rows


def mean_curve(runs: Sequence[RunFolder], kind: str, field: str, unit: str) -> Curve:
    """Positions that every run has reached, and the mean of the runs there."""
    by_run = [
        {r[unit]: _value(field, r[field]) for r in _records(run, kind) if field in r}
        for run in runs
    ]
    shared = sorted(set.intersection(*map(set, by_run))) if by_run else []
    return shared, [fmean(values[x] for values in by_run) for x in shared]


def _records(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    """Return records of a kind; runs of older versions have the losses of logged steps alone."""
    records = run.read_metrics(kind)
    return run.read_metrics("train") if kind == "train_mean" and not records else records


def _value(field: str, value: Any) -> float:
    return float(_WORST[field](value)) if isinstance(value, list) else float(value)
