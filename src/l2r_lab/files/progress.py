"""Progress of a run: the steps on record, and the steps of its recipe."""

from typing import NamedTuple

from l2r.files.folder import RunFolder


class Progress(NamedTuple):
    """step: the last on record, 0 without one. steps: planned, None where the run does not say.

    unit, seen: what progress is counted in, tokens or images, and how many of them there were.
    ended: whether the records reach the end of the plan, so that its last numbers are final.
    """

    step: int
    steps: int | None
    unit: str
    seen: int
    ended: bool

    def __str__(self) -> str:
        return f"{self.step} of {'?' if self.steps is None else self.steps}"


def read_progress(run: RunFolder) -> Progress:
    """Progress of a run by its training records.

    Where the plan is unknown (epochs of data whose size is not on record), a run has ended when
    its weights are there.
    """
    last = (run.read_metrics("train") or [{}])[-1]
    step, unit = last.get("step", 0), "images" if "images" in last else "tokens"
    seen = last.get(unit, 0)
    steps = _planned(run, unit, seen / step if step else None)
    ended = run.is_finished() if steps is None else step >= steps
    return Progress(step, steps, unit, seen, ended)


def _planned(run: RunFolder, unit: str, per_step: float | None) -> int | None:
    """Count the steps of the recipe's budget as training counts them."""
    steps, tokens, epochs = run.planned_steps(), *map(run.read_training, ("tokens", "epochs"))
    if steps is not None or not per_step:
        return steps
    if tokens is not None:
        return max(1, round(tokens / per_step))
    items = (run.read_json(run.environment).get("data") or {}).get(f"train_{unit}")
    if epochs is None or items is None:
        return None
    return max(1, round(epochs * (items // per_step)))
