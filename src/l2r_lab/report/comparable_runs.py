"""Results of runs that may be compared: at their ends, or at one place of all."""

from collections.abc import Sequence
from typing import Any

from l2r.files.folder import RunFolder
from l2r_lab.files.progress import Progress

Record = dict[str, Any]


def results_to_compare(
    runs: Sequence[RunFolder], progress: Sequence[Progress]
) -> tuple[list[Record], list[str]]:
    """Return validation record of every run, and what a reader must know of them.

    A run without a result has an empty record. Next to one that has ended, an unfinished run has
    none; where no run has ended, all have that of the last place that all have validated.
    """
    every = [run.read_metrics("validation") for run in runs]
    ended = {number for number, state in enumerate(progress) if state.ended}
    unit = progress[0].unit
    if not ended:
        return _at_one_place(every, unit)
    records = [r[-1] if n in ended and r else {} for n, r in enumerate(every)]
    late = [run.name for n, run in enumerate(runs) if n not in ended]
    notes = [f"Unfinished, so without results: {', '.join(late)}."] if late else []
    seen = [progress[n].seen for n in ended]
    if len(set(seen)) == 1:
        return records, notes
    spread = f"Runs saw from {min(seen):,} to {max(seen):,} {unit}: they are not comparable."
    return records, [*notes, spread]


def _at_one_place(every: Sequence[Sequence[Record]], unit: str) -> tuple[list[Record], list[str]]:
    places = [{record[unit]: record for record in records if unit in record} for records in every]
    shared = set[int].intersection(*map(set, places))
    if not shared:
        why = f"there is no validation at the same number of {unit}: nothing is compared."
        return [{} for _ in every], [f"No run is finished, and {why}"]
    last = max(shared)
    note = f"No run is finished: results are those at {last:,} {unit}, the last that all have."
    return [place[last] for place in places], [note]
