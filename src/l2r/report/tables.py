"""A table that the terminal, JSON and the report page all read."""

import html
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from l2r.files.wording import one_cell

NUMBER = re.compile(r"[-+]?\d\S*$")  # a column never breaks it, as at the hyphen of 2.9e-06

_WORDS = 30  # letters from which a cell is read as a sentence


@dataclass(frozen=True)
class Table:
    """Columns and rows of plain values; floats are shown with ``digits`` decimals.

    ``best`` marks, per column name, whether "max" or "min" is best; the page prints it bold where
    rows differ. ``few`` names the columns, most important first, that are shown with the first one
    where six have room (``brief``).
    ``verdict`` is the sentence that a terminal prints before the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    caption: str = ""
    digits: int = 4
    best: tuple[tuple[str, str], ...] = ()
    few: tuple[str, ...] = ()
    verdict: str = ""

    def records(self) -> list[dict[str, Any]]:
        """Rows as dictionaries, values unrounded."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def show(self, value: Any) -> str:
        """One value as text; a dash for missing values."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "-"
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, float):
            return f"{value:.{self.digits}f}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    def brief(self, most: int = 6, *, whole: str = "--json") -> "Table":
        """Cut the table to ``most`` columns and three decimals, for a terminal.

        The first column stays, then those of ``few`` that hold a value, in the table's order; the
        caption then names the others that hold a value, and ``whole``, where all are.
        """
        digits = min(self.digits, 3)
        if len(self.columns) <= most and not self.few:
            return replace(self, digits=digits)
        held = [
            c
            for c, n in zip(self.columns, range(len(self.columns)), strict=True)
            if any(self.show(row[n]) != "-" for row in self.rows)
        ]
        few = dict.fromkeys(self.few or self.columns[1:])
        wanted = [c for c in few if c in held and c != self.columns[0]]
        shown = {self.columns[0], *wanted[: most - 1]}
        places = [n for n, column in enumerate(self.columns) if column in shown]
        left = [column for column in held if column not in shown]
        more = f"{len(left)} more column{'s' * (len(left) > 1)}: {', '.join(left)}. See {whole}."
        return replace(
            self,
            columns=tuple(self.columns[n] for n in places),
            rows=tuple(tuple(row[n] for n in places) for row in self.rows),
            caption=more if left else self.caption,
            digits=digits,
            best=(),
        )

    def to_html(self) -> str:
        """HTML table element."""
        best = self._best_values()
        shown = [[self.show(value) for value in row] for row in self.rows]
        wordy = [any(_is_long(row[n]) for row in shown) for n in range(len(self.columns))]
        heads = zip(self.columns, wordy, strict=True)
        head = "".join(f"<th{_kind(c, words)}>{html.escape(c)}</th>" for c, words in heads)
        body = ""
        for row in shown:
            cells = ""
            for column, words, cell in zip(self.columns, wordy, row, strict=True):
                text = html.escape(cell)
                marked = column in best and cell == self.show(best[column])
                cells += f"<td{_kind(cell, words)}>{f'<b>{text}</b>' if marked else text}</td>"
            body += f"<tr>{cells}</tr>"
        caption = f"<p class='caption'>{prose(self.caption)}</p>" if self.caption else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{caption}"

    def to_markdown(self) -> str:
        """Markdown table, for pages of the documentation."""
        head, *rows = (
            f"| {' | '.join(map(one_cell, row))} |"
            for row in (self.columns, *([self.show(value) for value in row] for row in self.rows))
        )
        return "\n".join([head, f"|{' --- |' * len(self.columns)}", *rows]) + "\n"

    def _best_values(self) -> dict[str, float]:
        choose = {"max": max, "min": min}
        best = {}
        for column, direction in self.best:
            position = self.columns.index(column)
            values = [r[position] for r in self.rows if isinstance(r[position], int | float)]
            values = [v for v in values if not math.isnan(v)]
            if len({self.show(value) for value in values}) > 1:
                best[column] = choose[direction](values)
        return best


def _is_long(cell: str) -> bool:
    return len(cell) > _WORDS and " " in cell and not NUMBER.match(cell)


def _kind(cell: str, words: bool) -> str:
    """Class of a cell: of a column of sentences, a number, or a name, which nothing breaks."""
    if words:
        return " class='words'"
    if NUMBER.match(cell):
        return " class='number'"
    return " class='name'" if "-" in cell and " " not in cell and len(cell) > 1 else ""


def prose(text: str) -> str:
    """Text as HTML, with names in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
