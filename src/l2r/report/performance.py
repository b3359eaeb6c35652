"""Benchmark results as a table, figures and a page; reads the JSON that ``l2r bench`` writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from l2r.report.page import Section, write_page
from l2r.report.style import layout, router_colour
from l2r.report.tables import Table

AXES = {
    "tokens": "tokens T",
    "experts": "experts N",
    "heads": "anchors per expert H",
    "rank": "rank r",
    "hidden": "hidden size d",
}
_TIMES = ("median_us", "median_ms", "step_ms", "latency_ms", "peak_mib")
_DASHES = {"forward": "solid", "forward+backward": "dash"}


def bench_table(bench: Mapping[str, Any]) -> Table:
    """All records, with the machine in the caption."""
    records: Sequence[Mapping[str, Any]] = bench["records"]
    columns = tuple(records[0]) if records else ("contender",)
    place = ", ".join(f"{key} {value}" for key, value in bench["environment"].items() if value)
    rows = tuple(tuple(record[column] for column in columns) for record in records)
    caption = f"{bench['note']} {place}".strip()
    return Table(f"Benchmark: {bench['name']}", columns, rows, caption=caption, digits=3)


def scaling_figure(bench: Mapping[str, Any], axis: str, *, column: str = "median_us") -> go.Figure:
    """Time (``median_us``), memory (``peak_mib``) or ``ratio`` against one size, log-log.

    Of several forms of one router the best at each size is drawn.

    Raises ValueError for an axis or column that the benchmark does not have.
    """
    records = [record for record in bench["records"] if record.get("axis") == axis]
    if axis not in AXES or not records or column not in records[0]:
        raise ValueError(f"no records for axis={axis!r} and column={column!r} in this benchmark")
    lines: dict[tuple[str, str], dict[float, float]] = {}
    for record in records:  # of several forms of one router, the best at each size
        router = str(record["contender"]).split(",", 1)[0]
        points = lines.setdefault((router, record["phase"]), {})
        value = record[column]
        points[record["value"]] = min(value, points.get(record["value"], value))
    figure = go.Figure()
    for (router, phase), points in lines.items():
        figure.add_scatter(
            x=list(points),
            y=list(points.values()),
            name=f"{router}, {phase}",
            mode="lines+markers",
            line={"dash": _DASHES[phase], "color": router_colour(router)},
        )
    titles = {"median_us": "microseconds", "peak_mib": "peak MiB", "ratio": "ratio to linear"}
    figure.update_layout(layout(title=f"{titles[column].capitalize()} against {AXES[axis]}"))
    figure.update_xaxes(type="log", title=AXES[axis])
    figure.update_yaxes(type="log", title=titles[column])
    return figure


def bars_figure(bench: Mapping[str, Any]) -> go.Figure:
    """One bar per contender, one group per phase, with the range over the rounds."""
    records = [record for record in bench["records"] if record.get("correct", True)]
    time = next(name for name in _TIMES if records and name in records[0])
    unit = time.rsplit("_", 1)[1]
    figure = go.Figure()
    for name in dict.fromkeys(record["contender"] for record in records):
        chosen = [record for record in records if record["contender"] == name]
        groups = [_group(record) for record in chosen]
        low, high = f"low_{unit}", f"high_{unit}"
        error = None
        if low in chosen[0]:
            error = {
                "type": "data",
                "symmetric": False,
                "array": [record[high] - record[time] for record in chosen],
                "arrayminus": [record[time] - record[low] for record in chosen],
            }
        figure.add_bar(x=groups, y=[record[time] for record in chosen], name=name, error_y=error)
    figure.update_layout(layout(title=f"{bench['name']}: {time.replace('_', ' ')}"))
    figure.update_yaxes(type="log", title=unit)
    return figure


def write_bench_page(bench: Mapping[str, Any], path: Path) -> Path:
    """One self-contained page with the figures and the table of one benchmark."""
    axes = [axis for axis in AXES if any(r.get("axis") == axis for r in bench["records"])]
    figures: list[Any] = [
        scaling_figure(bench, axis, column=column)
        for axis in axes
        for column in ("median_us", "peak_mib")
    ]
    if not axes and bench["records"]:
        figures = [bars_figure(bench)]
    section = Section(str(bench["name"]), str(bench["note"]), (*figures, bench_table(bench)))
    place = ", ".join(f"{key} {value}" for key, value in bench["environment"].items() if value)
    return write_page(path, title="Performance", summary=place, sections=[section])


def _group(record: Mapping[str, Any]) -> str:
    """Phase, mode, shape and token count of a record, as one label."""
    parts = [record[key] for key in ("shape", "size", "phase", "mode") if key in record]
    if "tokens" in record:
        parts.append(f"T={record['tokens']}")
    return " ".join(str(part) for part in parts)
