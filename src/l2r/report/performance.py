"""Benchmark results as a table, figures and a page; reads the JSON that ``l2r bench`` writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from l2r.errors import InputError
from l2r.report.page import Section, write_page
from l2r.report.palette import INK, router_color, router_of
from l2r.report.style import layout
from l2r.report.tables import Table
from l2r.report.verdicts import Verdict
from l2r.runs.reading import parse_json, read_bytes

AXES = {
    "tokens": "tokens T",
    "experts": "experts N",
    "heads": "anchors per expert H",
    "rank": "rank r",
    "hidden": "hidden size d",
}
_TIMES = ("median_us", "median_ms", "step_ms", "latency_ms", "peak_mib")
_UNITS = {"us": "microseconds", "ms": "milliseconds", "mib": "peak MiB"}
_TERMINAL_COLUMNS = (
    "contender", "shape", "size", "phase", "axis", "value", "tokens", *_TIMES, "ratio",
)  # fmt: skip
_SUBJECTS = (
    "l2r_sips H16",
    "l2r",
    "record",
)  # what the sentence is about, the first that was timed
_DASHES = {"forward": "solid", "forward+backward": "dash"}


def bench_table(bench: Mapping[str, Any], *, ranges: bool = False) -> Table:
    """All records, with the machine in the caption; ``ranges`` gives ratios their quartiles."""
    records: Sequence[Mapping[str, Any]] = bench["records"]
    if ranges:
        records = [_with_range(record) for record in records]
    columns = tuple(records[0]) if records else ("contender",)
    place = ", ".join(f"{key} {value}" for key, value in bench["environment"].items() if value)
    rows = tuple(tuple(record[column] for column in columns) for record in records)
    caption = f"{bench['note']} {place}".strip()
    few = tuple(column for column in columns if column in _TERMINAL_COLUMNS)
    return Table(
        f"Benchmark: {bench['name']}",
        columns,
        rows,
        caption=caption,
        digits=3,
        few=few,
        verdict=of_bench(bench),
    )


def _with_range(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its ratio as text, quartiles in brackets."""
    if record.get("ratio_low") is None:
        return dict(record)
    low, high = record["ratio_low"], record["ratio_high"]
    return {**record, "ratio": f"{record['ratio']:.2f} ({low:.2f}-{high:.2f})"}


def of_bench(bench: Mapping[str, Any]) -> str:
    """Sentence with the least and the largest ratio of L2R as published, and what limited it.

    Of several forms the one with the least median counts. Without L2R the sentence is about the
    contender that is first in most groups.
    """
    right = {group: own for group in groups(bench) if (own := _right(bench, group))}
    cost = next((name for name in _TIMES if right and name in next(iter(right.values()))[0]), None)
    if cost is None:
        return "Nothing was measured."
    best = {group: min(own, key=lambda record: record[cost]) for group, own in right.items()}
    leaders = [str(record["contender"]) for record in best.values()]
    subject = max(leaders, key=leaders.count)
    timed = " ".join(str(record["contender"]) for own in right.values() for record in own)
    subject = next((name for name in _SUBJECTS if name in timed), subject)
    own = [
        min(named, key=lambda record: record[cost])
        for records in right.values()
        if (named := [r for r in records if subject in str(r["contender"])])
    ]
    low, *_, high = sorted(own, key=lambda record: record["ratio"]) * 2
    what = {"step": "speed", "memory": "memory"}.get(bench["name"], "time")
    text = f"{subject}: {what} ratio {_shown(low)}"
    if low is not high:
        text += f", to {_shown(high)}"
    return f"{text}. Ratios are of this machine alone."


def _shown(record: Mapping[str, Any]) -> str:
    """Ratio of a record with its group, and the share of its time that the machine needs."""
    group, ratio = _group(record), _with_range(record)["ratio"]
    text = ratio if isinstance(ratio, str) else f"{ratio:.2f}"
    text += f" at {group}" if group else ""
    limit = record.get("limit_us")
    if limit is None:
        return text
    share = min(1.0, limit / record["median_us"])
    least = f"at least {share:.0%}" if share >= 0.005 else "hardly any"
    return f"{text} ({least} of it {record['limited_by']})"


def scaling_figure(bench: Mapping[str, Any], axis: str, *, column: str = "median_us") -> go.Figure:
    """Time (``median_us``) or memory (``peak_mib``) against one size, log-log.

    Of several forms of one router the best at each size is drawn.
    """
    records = [record for record in bench["records"] if record.get("axis") == axis]
    lines: dict[tuple[str, str], dict[float, float]] = {}
    for record in records:
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
            line={"dash": _DASHES[phase], "color": router_color(router)},
        )
    title = _UNITS[column.rsplit("_", 1)[1]]
    figure.update_layout(layout(title=f"{title[0].upper()}{title[1:]} against {AXES[axis]}"))
    values = sorted({record["value"] for record in records})
    figure.update_xaxes(type="log", title=AXES[axis], tickvals=values, ticktext=values)
    figure.update_yaxes(type="log", title=title, dtick="D2")
    return figure


def groups(bench: Mapping[str, Any]) -> list[str]:
    """Labels of the groups whose contenders were timed against each other."""
    return list(dict.fromkeys(_group(record) for record in bench["records"]))


def _right(bench: Mapping[str, Any], group: str) -> list[Mapping[str, Any]]:
    """Records of a group whose results are correct."""
    return [r for r in bench["records"] if _group(r) == group and r.get("correct", True)]


def bars_figure(bench: Mapping[str, Any], group: str) -> go.Figure:
    """A bar per contender of a group, its ratio after its name, with the range over the rounds."""
    records = _right(bench, group)
    time = next(name for name in _TIMES if name in records[0])
    unit = time.rsplit("_", 1)[1]
    low, high = f"low_{unit}", f"high_{unit}"
    error = None
    if low in records[0]:
        error = {
            "type": "data",
            "color": INK,
            "symmetric": False,
            "array": [record[high] - record[time] for record in records],
            "arrayminus": [record[time] - record[low] for record in records],
        }
    names = [f"{record['contender']}  ({record['ratio']:.2f})" for record in records]
    figure = go.Figure(
        go.Bar(
            x=[record[time] for record in records],
            y=names,
            orientation="h",
            marker={"color": [_color(str(record["contender"])) for record in records]},
            error_x=error,
        )
    )
    height = 130 + 26 * len(records)
    margin = {"l": 230, "r": 30, "t": 60, "b": 60}
    figure.update_layout(
        layout(wide=520, title=group or str(bench["name"]), height=height, margin=margin)
    )
    figure.update_xaxes(title=_UNITS[unit], rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure


def bench_section(bench: Mapping[str, Any]) -> Section:
    """Figures and table of one benchmark, as a section of a page."""
    axes = [axis for axis in AXES if any(r.get("axis") == axis for r in bench["records"])]
    figures: list[Any] = [
        scaling_figure(bench, axis, column=column)
        for axis in axes
        for column in ("median_us", "peak_mib")
    ]
    if not axes and bench["records"]:
        figures = [bars_figure(bench, group) for group in groups(bench) if _right(bench, group)]
    return Section(f"Speed: {bench['name']}", str(bench["note"]), (*figures, bench_table(bench)))


def read_bench(path: Path) -> dict[str, Any]:
    """A benchmark written by ``l2r bench --out``. Raises ValueError for any other file."""
    try:
        bench: dict[str, Any] = parse_json(read_bytes(path), strict=False)
        bench_section(bench)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise InputError(
            f"bench must be a JSON file written by l2r bench --out; got {path} ({error!r})"
        ) from error
    return bench


def write_bench_page(bench: Mapping[str, Any], path: Path) -> Path:
    """One self-contained page with the figures and the table of one benchmark."""
    place = ", ".join(f"{key} {value}" for key, value in bench["environment"].items() if value)
    verdict = Verdict(of_bench(bench), "Other machines, other sizes, and this one under load.")
    sections = [bench_section(bench)]
    return write_page(path, title="Performance", summary=place, sections=sections, verdict=verdict)


def _color(contender: str) -> str:
    """Color of the first router that a contender's name mentions."""
    words = contender.replace(",", " ").split()
    return router_color(next((word for word in words if router_of(word)), contender))


def _group(record: Mapping[str, Any]) -> str:
    """Phase, mode, shape and token count of a record, as one label."""
    names = ("shape", "size", "phase", "mode")
    parts = [str(record[name]) for name in names if record.get(name) not in (None, "-", "eager")]
    if "axis" in record:
        parts.append(f"{record['axis']} {record['value']}")
    if "tokens" in record:
        parts.append(f"T = {record['tokens']}")
    return ", ".join(parts)
