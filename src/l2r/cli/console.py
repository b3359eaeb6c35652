"""Printing tables: for people with rich, for programs as JSON."""

import json

import typer
from rich.console import Console
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
