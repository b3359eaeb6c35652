"""Table of the downstream accuracies that ``l2r eval`` wrote into run folders."""

from collections.abc import Mapping, Sequence
from typing import Any

from l2r.files.folder import RunFolder
from l2r.report.tables import Table

NOTES = (
    "Per cent of documents, ± one standard error over documents, not over seeds of training. "
    "* at chance: the 95% interval reaches down to the accuracy of guessing."
)
_SAME = ("split", "limit", "requests", "max_length")  # settings that decide what is scored


def task_accuracies(runs: Sequence[RunFolder]) -> list[Table]:
    """Accuracy of every evaluated run by task, with standard errors; nothing where none is.

    A star marks a number that is at chance: its 95% interval reaches down to the accuracy of
    guessing, which ``l2r eval`` writes into evaluation.json beside the numbers.
    """
    records = {run.name: run.read_json(run.evaluation) for run in runs}
    records = {name: record for name, record in records.items() if record.get("accuracy")}
    if not records:
        return []
    columns = list(dict.fromkeys(c for record in records.values() for c in record["accuracy"]))
    columns = [
        c for c in columns if any(r["accuracy"].get(c) is not None for r in records.values())
    ]
    rows = tuple(
        (name, *(accuracy_cell(r, column) for column in columns)) for name, r in records.items()
    )
    notes = [NOTES]
    missing = [run.name for run in runs if run.name not in records]
    if missing:
        notes.append(f"Not evaluated: {', '.join(missing)}.")
    unmarked = [name for name, record in records.items() if not record.get("chance")]
    if unmarked:
        notes.append(f"Evaluated before chance was written, so not marked: {', '.join(unmarked)}.")
    kinds = [_settings(record) for record in records.values()]
    if any(kind != kinds[0] for kind in kinds):
        notes.append("The runs were evaluated with different settings: they are not comparable.")
    title = "Downstream accuracy (%) ± standard error; * at chance"
    few = ("Overall", "MMLU", "HSwag", "BoolQ", "PIQA", "SciQ", *columns)
    few = tuple(column for column in few if column in columns)
    return [Table(title, ("router", *columns), rows, " ".join(notes), few=few)]


def _settings(record: Mapping[str, Any]) -> dict[str, Any]:
    settings = record.get("settings") or {}
    return {name: settings.get(name) for name in _SAME}


def accuracy_cell(record: Mapping[str, Any], column: str) -> str | None:
    """Write a column of evaluation.json as ``39.6±0.9``, with a star at chance."""
    value = record["accuracy"].get(column)
    if value is None:
        return None
    error = (record.get("standard_error") or {}).get(column)
    low, _ = (record.get("interval") or {}).get(column) or (None, None)
    chance = (record.get("chance") or {}).get(column)
    text = f"{value:.1f}" if error is None else f"{value:.1f}±{error:.1f}"  # no space: one word
    at_chance = low is not None and chance is not None and low <= chance
    return f"{text}*" if at_chance else text
