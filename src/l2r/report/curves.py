"""Training curves of one run or several, from metrics.jsonl."""

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from l2r.data.run_folder import RunFolder
from l2r.report.style import layout, router_colour

# (record kind, field, panel title, axis title)
LANGUAGE_PANELS = (
    ("train", "ce", "Training cross-entropy", "nats per token"),
    ("validation", "ce/mean", "Validation cross-entropy, mean of domains", "nats per token"),
    ("train", "balance", "Load-balance loss, mean of layers", "L_bal (k = balanced)"),
    ("train", "z", "Router z-loss, mean of layers", "L_z"),
)
VISION_PANELS = (
    ("train", "ce", "Training cross-entropy of soft targets", "nats per image"),
    ("validation", "top1", "Validation top-1 accuracy", "share of images"),
    ("validation", "ce", "Validation cross-entropy", "nats per image"),
    ("train", "balance", "Load-balance loss, mean of layers", "L_bal (k = balanced)"),
)
HEALTH_PANELS = (
    ("train", "load_entropy", "Load entropy, lowest layer", "share of the largest possible"),
    ("train", "max_over_mean", "Largest load, worst layer", "load of busiest expert / mean"),
    ("train", "dead_experts", "Experts without a token", "experts, all layers"),
    ("train", "grad_norm", "Gradient norm before clipping", "l2 norm"),
)
_WORST: dict[str, Callable[..., float]] = {
    "load_entropy": min,
    "max_over_mean": max,
    "dead_experts": sum,
}


def curves(
    runs: Sequence[RunFolder], panels: Sequence[tuple[str, str, str, str]], unit: str
) -> go.Figure:
    """A panel per number, a line per run, against ``unit`` (tokens or images) seen."""
    columns = 2
    rows = -(-len(panels) // columns)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[title for _, _, title, _ in panels],
        vertical_spacing=0.28 / rows,
    )
    for number, (kind, field, _, axis) in enumerate(panels):
        row, column = number // columns + 1, number % columns + 1
        for position, run in enumerate(runs):
            records = [r for r in run.read_metrics(kind) if field in r]
            figure.add_scatter(
                x=[record[unit] for record in records],
                y=[_value(field, record[field]) for record in records],
                name=run.name,
                legendgroup=run.name,
                showlegend=number == 0,
                mode="lines+markers" if len(records) < 20 else "lines",
                line={"color": router_colour(run.name, position), "width": 1.8},
                row=row,
                col=column,
            )
        figure.update_xaxes(title_text=unit, row=row, col=column)
        figure.update_yaxes(title_text=axis, row=row, col=column)
    legend = {"orientation": "h", "y": 1.0 + 0.22 / rows, "x": 0}
    figure.update_layout(**layout(height=360 * rows + 40, legend=legend, margin={"t": 110}))
    return figure


def _value(field: str, value: Any) -> float:
    return float(_WORST[field](value)) if isinstance(value, list) else float(value)
