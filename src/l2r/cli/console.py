"""Printing tables: for people with rich, for programs as JSON."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table as RichTable

from l2r.report.tables import Table


def print_table(table: Table, *, as_json: bool = False) -> None:
    """Print a table on standard output; with ``as_json`` as a list of records."""
    if as_json:
        typer.echo(json.dumps(table.records(), indent=2))
        return
    grid = RichTable(title=table.title, caption=table.caption or None, title_justify="left")
    for position, column in enumerate(table.columns):
        grid.add_column(column, justify="left" if position == 0 else "right")
    for row in table.rows:
        grid.add_row(*(table.show(value) for value in row))
    width = None if Console().is_terminal else 200
    Console(width=width, markup=False, emoji=False).print(grid)


@contextmanager
def progress_bars() -> Iterator[Callable[..., None]]:
    """A bar on standard error for each name that is reported: (name, done, total, note)."""
    bars: dict[str, TaskID] = {}
    name = TextColumn("{task.description}")
    note = TextColumn("{task.fields[note]}")
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def report(name: str, done: int, total: int, note: str = "") -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=total, note=note)
            progress.update(bars[name], completed=done, note=note)

        yield report
