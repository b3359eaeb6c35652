"""Progress of runs: which are unfinished, and the validation records that may be compared."""

from collections.abc import Sequence
from typing import Any

from l2r.runs.folder import RunFolder

Record = dict[str, Any]


def label(run: RunFolder) -> str:
    """Name of a run; with the step that it has reached while it is unfinished."""
    if run.is_finished():
        return run.name
    step = (run.read_metrics("train") or [{"step": 0}])[-1]["step"]
    planned = run.planned_steps()
    return f"{run.name} (unfinished: step {step}{f' of {planned}' if planned else ''})"


def comparable_validations(runs: Sequence[RunFolder]) -> tuple[dict[str, Record], str]:
    """Validation record of each run by its name, and a sentence where these are not its last.

    Finished runs, and a run by itself, have their last record. Beside an unfinished one all have
    the record of the last step that every run has validated, or none.
    """
    records = {run.name: run.read_metrics("validation") for run in runs}
    if len(runs) == 1 or all(run.is_finished() for run in runs):
        return {name: of[-1] for name, of in records.items() if of}, ""
    steps = set.intersection(*({record["step"] for record in of} for of in records.values()))
    if not steps:
        return {}, "Some runs are unfinished, with no validation at a step that all of them have."
    step = max(steps)
    chosen = {n: next(r for r in of if r["step"] == step) for n, of in records.items()}
    return chosen, (
        f"Some runs are unfinished: losses are those at step {step}, the last that all of them "
        "have."
    )
