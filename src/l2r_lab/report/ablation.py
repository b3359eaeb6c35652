"""Ablation tables in the paper's layout, and the curves that go with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from l2r.files.final_losses import final_losses
from l2r.files.folder import RunFolder
from l2r.report.style import layout
from l2r.report.tables import Table
from l2r.stats.intervals import Interval, mean_interval
from l2r_lab.report.curves import line_panels, mean_curve
from l2r_lab.report.paper_tables import seeds_caption, show_count
from l2r_lab.report.verdicts import of_arms


@dataclass(frozen=True)
class Row:
    """One choice of the grid: its settings by field, its runs (one per seed) and their numbers.

    linear_parameters: what linear routers in the same layers would have.
    """

    settings: Mapping[str, Any]
    runs: Sequence[RunFolder]
    numbers: Mapping[str, Interval]
    router_parameters: int | None = None
    linear_parameters: int | None = None

    @property
    def label(self) -> str:
        """Settings in one phrase, e.g. ``l2r_sips, rank 2, heads 4``."""
        return ", ".join(phrase(field, value) for field, value in self.settings.items())


@dataclass(frozen=True)
class Ablation:
    """Rows that differ in ``field`` alone; ``fixed`` is what they share of the grid."""

    field: str
    fixed: Mapping[str, Any]
    rows: Sequence[Row]

    @property
    def title(self) -> str:
        """Title in the form of the paper's captions: ``Varying rank with heads 4``."""
        name = field_name(self.field)
        shared = ", ".join(phrase(field, value) for field, value in self.fixed.items())
        return f"Varying {name}" + (f" with {shared}" if shared else "")


# Record -> column and its factor, in the paper's order.
_TASKS = {
    "mmlu": "MMLU",
    "boolq": "BoolQ",
    "hellaswag": "HSwag",
    "piqa": "PIQA",
    "sciq": "SciQ",
    "overall": "Overall",
}
_PERCENT = (*_TASKS.values(), "Top-1", "Top-5")
_LOSSES = {"train_ce": "train CE", "validation_ce": "val CE", "balance": "balance loss"}
COLUMNS = (*_PERCENT, *_LOSSES.values())
_TERMINAL_COLUMNS = ("Router params", "Top-1", "val CE", "Overall", "train CE", "balance loss")
_NAMES = {"router.rank": "rank", "router.heads": "heads", "router.kind": "router"}
_HEADS = {"router.rank": "Rank", "router.heads": "H", "router.kind": "Router"}


def field_name(field: str) -> str:
    """Name a field of a recipe: ``rank`` for router.rank."""
    return _NAMES.get(field, field)


def phrase(field: str, value: Any) -> str:
    """One setting in words; a router is called by its name alone."""
    if field == "router.kind":
        return str(value)
    return f"{field_name(field)} {value}"


def final_numbers(run: RunFolder) -> dict[str, float]:
    """Collect what a finished run is judged by, by column; accuracies in per cent.

    Accuracies come from evaluation.json (l2r eval) or else from the last evaluation in
    training. Train CE (of every step) and balance loss (of the logged ones) are means over the
    last tenth of training.
    """
    numbers: dict[str, float] = {}
    asked = (run.read_metrics("tasks") or [{}])[-1]
    numbers |= {column: 100 * asked[task] for task, column in _TASKS.items() if task in asked}
    whole = run.read_json(run.evaluation).get("accuracy", {})
    numbers |= {c: whole[c] for c in _TASKS.values() if whole.get(c) is not None}
    validation = (run.read_metrics("validation") or [{}])[-1]
    for field, column in (("top1", "Top-1"), ("top5", "Top-5")):
        if field in validation:
            numbers[column] = 100 * validation[field]
    losses = final_losses(run)
    return numbers | {column: losses[name] for name, column in _LOSSES.items() if name in losses}


def seed_row(settings: Mapping[str, Any], runs: Sequence[RunFolder]) -> Row:
    """One choice of the grid from its runs, with mean and interval over them."""
    results = [final_numbers(run) for run in runs]
    numbers = {
        column: mean_interval([values[column] for values in results])
        for column in COLUMNS
        if all(column in values for values in results)
    }
    facts = runs[0].read_json(runs[0].environment)
    sizes = (facts.get("router_parameters"), facts.get("linear_router_parameters"))
    return Row(settings, runs, numbers, *sizes)


def sweep_table(rows: Sequence[Row]) -> Table:
    """One row per choice of the grid, numbers with the ends of their interval, for programs."""
    fields = list(dict.fromkeys(field for row in rows for field in row.settings))
    shown = _columns(rows)
    columns = [*fields, "seeds", "router params"]
    columns += [text for column in shown for text in (column, f"{column} low", f"{column} high")]
    table = []
    for row in rows:
        cells: list[Any] = [row.settings.get(field) for field in fields]
        cells += [len(row.runs), row.router_parameters]
        for column in shown:
            cells += row.numbers.get(column, (None, None, None))
        table.append(tuple(cells))
    return Table("Sweep", tuple(columns), tuple(table))


def ablations(rows: Sequence[Row]) -> list[Ablation]:
    """Every set of at least two rows that differ in one field of the grid alone."""
    sets = []
    for field in dict.fromkeys(field for row in rows for field in row.settings):
        groups: dict[str, list[Row]] = {}
        for row in rows:
            if field in row.settings:
                groups.setdefault(repr(_without(row.settings, field)), []).append(row)
        for group in groups.values():
            if len(group) > 1:
                sets.append(Ablation(field, _without(group[0].settings, field), group))
    return sets


def ablation_table(ablation: Ablation) -> Table:
    """Return the paper's layout: a row per value; with the router's size but for ranks."""
    shown = _columns(ablation.rows)
    sizes = ablation.field != "router.rank"
    rows = []
    for row in ablation.rows:
        size = [_size(row)] if sizes else []
        numbers = [show_number(row, column) for column in shown]
        rows.append((str(row.settings[ablation.field]), *size, *numbers))
    head = _HEADS.get(ablation.field, ablation.field)
    columns = (head, *(["Router params"] if sizes else []), *shown)
    caption = _caption(ablation.rows, shown, sizes=sizes)
    return Table(ablation.title, columns, tuple(rows), caption=caption, few=_TERMINAL_COLUMNS)


def all_rows_table(rows: Sequence[Row]) -> Table:
    """Every choice of the grid in one table, for people."""
    shown = _columns(rows)
    return Table(
        "All cells",
        ("cell", "Router params", *shown),
        tuple(
            (row.label, _size(row), *(show_number(row, column) for column in shown)) for row in rows
        ),
        caption=_caption(rows, shown),
        few=_TERMINAL_COLUMNS,
        verdict=of_arms({row.label: row.runs for row in rows}).says,
    )


def ablation_curves(sets: Sequence[Ablation], unit: str) -> go.Figure:
    """Training cross-entropy against ``unit``, a panel per ablation and a line per value."""
    content = []
    for ablation in sets:
        names = [phrase(ablation.field, row.settings[ablation.field]) for row in ablation.rows]
        curves = [mean_curve(row.runs, "train_mean", "ce", unit) for row in ablation.rows]
        lines = dict(zip(names, curves, strict=True))
        content.append((ablation.title, "training cross-entropy (nats)", lines))
    figure, rows = line_panels(content, unit)
    for line in figure.data:
        line.update(legendgrouptitle_text=line.legendgroup)
    figure.update_layout(**layout(wide=760, height=max(380, 340 * rows + 60)))
    return figure


def show_number(row: Row, column: str) -> str:
    """``41.6 ± 0.3`` in per cent, four decimals for losses; no interval for one seed."""
    spread = row.numbers.get(column)
    if spread is None:
        return "-"
    digits = 1 if column in _PERCENT else 4
    text = f"{spread.mean:.{digits}f}"
    return text if len(row.runs) == 1 else f"{text} ± {spread.half:.{digits}f}"


def _columns(rows: Sequence[Row]) -> list[str]:
    return [column for column in COLUMNS if any(column in row.numbers for row in rows)]


def _size(row: Row) -> str:
    if row.router_parameters is None:
        return "-"
    if not row.linear_parameters:
        return f"{row.router_parameters:,}"
    return show_count(row.router_parameters, row.linear_parameters)


def _without(settings: Mapping[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != field}


def _caption(rows: Sequence[Row], shown: Sequence[str], *, sizes: bool = True) -> str:
    accuracies = any(column in _PERCENT for column in shown)
    text = "Accuracies in per cent, CE in nats." if accuracies else "CE in nats."
    if sizes:
        text += " Router parameters over all MoE layers, and their share of the linear router's."
    return f"{text} {seeds_caption(sorted({len(row.runs) for row in rows}))}"
