"""Printing tables: for people with rich, for programs as JSON."""

import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
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

from l2r.report.tables import NUMBER, Table
from l2r.runs.plain_json import plain_json

_NAME = 20  # characters of a row's name that are not broken: a quarter of the usual width


def print_table(table: Table, *, as_json: bool = False) -> None:
    """Print a table on standard output: its verdict, then at most six columns.

    With ``as_json`` all columns, as a list of records. The width is that of the terminal, COLUMNS
    or 80 characters.
    """
    if as_json:
        typer.echo(plain_json(table.records()))
        return
    console, brief = Console(markup=False, emoji=False, highlight=False), table.brief()
    if brief.verdict:
        console.print(brief.verdict, end="\n\n")
    grid = RichTable(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    cells = [[brief.show(value) for value in row] for row in brief.rows]
    columns = [(name, [row[at] for row in cells]) for at, name in enumerate(brief.columns)]
    full = sum(max(map(len, (name, *own))) + len(" | ") for name, own in columns)
    for position, (name, own) in enumerate(columns):
        longest = max(map(len, own), default=0)
        number = position > 0 and all(cell == "-" or NUMBER.match(cell) for cell in own)
        header = max(map(len, name.split()), default=0)
        grid.add_column(
            name,
            justify="right" if number else "left",
            overflow="fold",
            # rich shrinks columns without regard for a least width: numbers have theirs fixed
            width=max(longest, header) if number and full > console.width else None,
            no_wrap=position == 0 and longest <= _NAME,
            min_width=_NAME if position == 0 and longest > _NAME else None,
        )
    for row in cells:
        grid.add_row(*row)
    for part in (brief.title, grid, brief.caption):
        if part:
            console.print(part)


def print_text(text: str) -> None:
    """Print a sentence on standard output, broken between words."""
    Console(markup=False, emoji=False, highlight=False).print(text)


def print_pages(pages: Sequence[Path], *, show: bool = False, err: bool = False) -> None:
    """Name every page that was written, with its path; ``show`` opens the first in the browser."""
    for page in pages:
        typer.echo(f"page: {page}", err=err)
    if show and pages and not webbrowser.open(pages[0].resolve().as_uri()):
        typer.echo("no browser was found to open the page", err=True)


@contextmanager
def progress_bars() -> Iterator[Callable[..., None]]:
    """A bar on standard error for each name that is reported: (name, done, total, note)."""
    bars: dict[str, TaskID] = {}
    name = TextColumn("{task.description}")
    note = TextColumn("{task.fields[note]}")
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
    hour = 3600.0  # seconds of which the speed is taken: a step may take minutes
    console = Console(stderr=True)
    with Progress(*columns, console=console, speed_estimate_period=hour) as progress:

        def report(name: str, done: int, total: int, note: str = "") -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=total, note=note)
            progress.update(bars[name], completed=done, note=note)

        yield report
