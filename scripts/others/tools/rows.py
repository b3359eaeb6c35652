"""Rows of the table: a claim about a tool, checked by a function of a subject."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

from scripts.others.tools.subjects import SUBJECTS, Subject

Check = Callable[[Subject], None]


class Row(NamedTuple):
    """A claim; ``check`` raises where it does not hold. ``kinds`` are those it is for."""

    claim: str
    check: Check


class Result(NamedTuple):
    """Outcome for one subject: ``error`` is empty where the claim holds."""

    claim: str
    kind: str
    family: str
    error: str


def row(rows: list[Row], claim: str) -> Callable[[Check], Check]:
    """Add a check to the rows of a tool."""

    def add(check: Check) -> Check:
        rows.append(Row(claim, check))
        return check

    return add


def run(rows: list[Row], only: str = "") -> list[Result]:
    """Every row for every subject, in this process."""
    results = []
    for claim, check in rows:
        for subject in SUBJECTS if only in claim else ():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results.append(Result(claim, *subject, error_of(check, subject)))
    return results


def error_of(check: Callable[[Subject], object], subject: Subject) -> str:
    """What a check raised, in a line; nothing where the claim holds."""
    try:
        check(subject)
    except Exception as error:  # what a tool raises is a cell of the table
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:160]}"
    return ""
