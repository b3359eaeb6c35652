"""The tables of ``l2r eval``: downstream tasks with paired differences, and images."""

from collections.abc import Mapping, Sequence
from typing import Any

from l2r.report.tables import Table

Row = Mapping[str, float | None]
# Difference, lower and upper end of its interval, as shares of 1.
Difference = tuple[float, float, float]


def downstream_table(
    columns: Sequence[str],
    rows: Mapping[str, tuple[Row, Row]],
    differences: Mapping[str, Mapping[str, Difference]],
) -> Table:
    """Accuracy and standard error of every checkpoint in percent, then every difference.

    ``rows`` maps a checkpoint to both, by column; ``differences`` a pair's name to its columns.
    """
    cells: list[tuple[str | float | None, ...]] = []
    for name, (accuracy, error) in rows.items():
        cells.append((name, *(accuracy[column] for column in columns)))
        cells.append(("standard error", *(error[column] for column in columns)))
    for name, by_column in differences.items():
        for position, label in enumerate((name, "95% from", "95% to")):
            values = (100 * by_column[c][position] if c in by_column else None for c in columns)
            cells.append((label, *values))
    caption = "MMLU is the mean of its four groups, Overall the mean of all eight tasks."
    if differences:
        caption += " Differences are over the same documents, by pairs."
    return Table("Downstream accuracy (%)", ("Model", *columns), tuple(cells), caption, digits=1)


def images_table(record: Mapping[str, Any]) -> Table:
    """Accuracies with the standard errors of shares of independent images, from evaluation.json."""
    shares, images = [record["top1"], record["top5"]], record["images"]
    errors = [100 * (share * (1 - share) / images) ** 0.5 for share in shares]
    name = record["checkpoint"] + (" (average)" if record["averaged"] else "")
    accuracies = [100 * share for share in shares]
    return Table(
        "Accuracy on images (%)",
        ("Model", "Top-1 (%)", "Top-5 (%)", "CE", "images", "skipped"),
        (
            (name, *accuracies, record["ce"], images, len(record["skipped"])),
            ("standard error", *errors, None, None, None),
        ),
        digits=2,
    )
