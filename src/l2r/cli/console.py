"""Printing tables: for people with rich, for programs as JSON."""

import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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

from l2r.cli.output import echo
from l2r.files.atomic import plain_json
from l2r.files.wording import printable
from l2r.report.tables import NUMBER, Table

_COLUMNS = 6
_NAME = 20  # characters of a row's name that are not broken: a quarter of the usual width
_BETWEEN = 3  # characters from a column to the next


def print_table(
    table: Table, *, as_json: bool = False, max_columns: int = _COLUMNS, whole: str = "--json"
) -> None:
    """Print a table on standard output: its verdict, then at most ``max_columns`` columns.

    With ``as_json`` all columns, as a list of records. The width is that of the terminal, COLUMNS
    or 80 characters; one that is too narrow for the columns has fewer, names the others and
    ``whole``, where all are, and no number is cut.
    """
    if as_json:
        echo(plain_json(table.records()))
        return
    console = Console(markup=False, emoji=False, highlight=False)
    for limit in range(max_columns, 1, -1):
        brief = table.brief(limit, whole=whole)
        columns = _columns(brief)
        if sum(column.min_width + _BETWEEN for column in columns) <= console.width:
            break
    if brief.verdict:
        console.print(printable(brief.verdict), end="\n\n")
    grid = RichTable(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    widths = _widths(columns, console.width)
    for position, column in enumerate(columns):
        grid.add_column(
            column.name,
            justify="right" if column.is_number else "left",
            overflow="fold",
            # rich shrinks columns without regard for a minimum width
            width=widths[position] if widths else None,
            no_wrap=position == 0 and column.longest <= _NAME,
            min_width=_NAME if position == 0 and column.longest > _NAME else None,
        )
    cells = zip(*(column.cells for column in columns), strict=True)
    for row in cells:
        grid.add_row(*row)
    for part in (brief.title, grid, brief.caption):
        if part:
            console.print(printable(part) if isinstance(part, str) else part)


@dataclass(frozen=True)
class _Column:
    name: str
    cells: tuple[str, ...]
    is_first: bool

    @property
    def longest(self) -> int:
        return max(map(len, self.cells), default=0)

    @property
    def is_number(self) -> bool:
        return not self.is_first and all(c == "-" or NUMBER.match(c) for c in self.cells)

    @property
    def max_width(self) -> int:
        """Width in which nothing is broken."""
        return max(len(self.name), self.longest)

    @property
    def min_width(self) -> int:
        """Width in which no word of the header is broken, and no number, short name or word."""
        header = max(map(len, self.name.split()), default=0)
        words = max((len(word) for cell in self.cells for word in cell.split()), default=0)
        longest = self.longest if self.is_first else words
        return max(header, self.longest if self.is_number else min(longest, _NAME))


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """Width of each column: its least, and what is left to the first that need more.

    Empty where every cell fits on one line, or not even the least widths fit.
    """
    left = width - sum(column.min_width + _BETWEEN for column in columns)
    if left < 0 or sum(column.max_width + _BETWEEN for column in columns) <= width:
        return []
    widths = []
    for column in columns:
        more = min(left, 0 if column.is_number else max(0, column.max_width - column.min_width))
        widths.append(column.min_width + more)
        left -= more
    return widths


def _columns(table: Table) -> list[_Column]:
    cells = [[printable(table.show(value)) for value in row] for row in table.rows]
    return [
        _Column(printable(name), tuple(row[at] for row in cells), at == 0)
        for at, name in enumerate(table.columns)
    ]


def print_text(text: str) -> None:
    """Print a sentence on standard output, broken between words."""
    Console(markup=False, emoji=False, highlight=False).print(printable(text))


def print_pages(pages: Sequence[Path], *, show: bool = False, err: bool = False) -> None:
    """Name every page that was written, with its path; ``show`` opens the first in the browser."""
    for page in pages:
        echo(f"page: {page}", err=err)
    if show and pages and not webbrowser.open(pages[0].resolve().as_uri()):
        echo("no browser was found to open the page", err=True)


@contextmanager
def progress_bars() -> Iterator[Callable[..., None]]:
    """Show a bar on standard error for each name that is reported: (name, done, total, note)."""
    bars: dict[str, TaskID] = {}
    name = TextColumn("{task.description}", markup=False)
    note = TextColumn("{task.fields[note]}", markup=False)
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note)
    hour = 3600.0  # seconds of which the speed is taken: a step may take minutes
    console = Console(stderr=True)
    with Progress(*columns, console=console, speed_estimate_period=hour) as progress:

        def report(name: str, done: int, total: int, note: str = "") -> None:
            if name not in bars:
                bars[name] = progress.add_task(printable(name), total=total, note="")
            progress.update(bars[name], completed=done, note=printable(note))

        yield report
