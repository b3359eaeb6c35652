"""A study: one small JSON file per cell, enough to judge and to go on without its run.

ARM.seed-N.json    the whole file, or none of it
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from l2r.runs.atomic import write_text
from l2r.runs.reading import parse_json, read_bytes
from l2r.stats.contrasts import Judged
from l2r.stats.effects import Levels

# By name what a cell measures, at its end and at step 0, and what it does of images alone.
MEASURES = (
    "train_ce", "validation_ce", "balance", "routing_gain", "shuffled_gain", "load_entropy",
    "max_over_mean", "dead_experts", "top1_entropy", "scale_free_margin", "mean_margin",
    "low_margin_rate", "cosine_variance", "stability", "topk_overlap", "relative_stability",
    "relative_topk_overlap", "logit_spread", "weight_sum", "first_experts", "flipped_decisions",
    "flipped_tokens",
)  # fmt: skip
OF_IMAGES = ("top1",)
_DIGITS = 7  # of stored measures: more than the seeds agree on, less than rounding disturbs


@dataclass(frozen=True)
class CellResult:
    """What one run measured.

    trained, untrained: measures at the end and at step 0, by the same names. curve: (step, mean
    training loss of all steps since the last point). recipe: every field. plan: digest of the
    plan's text, and the commit it stood in or None. facts: seconds, versions, hardware.
    """

    arm: str
    seed: int
    trained: Mapping[str, float]
    untrained: Mapping[str, float]
    curve: Sequence[tuple[int, float]]
    recipe: Mapping[str, Any]
    plan: Mapping[str, Any]
    facts: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write the file, a line per field."""
        values = asdict(self)
        for name in ("trained", "untrained"):
            values[name] = {k: _rounded(v) for k, v in values[name].items()}
        values["curve"] = [(step, _rounded(loss)) for step, loss in self.curve]
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in values.items()]
        write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_result(path: Path) -> CellResult:
    """One file. Raises ValueError where it is not one."""
    try:
        values = parse_json(read_bytes(path), strict=False)
        values["curve"] = [(int(step), float(loss)) for step, loss in values["curve"]]
        for name in ("trained", "untrained"):
            values[name] = {metric: float(value) for metric, value in values[name].items()}
        result = CellResult(**values)
        fits = isinstance(result.arm, str) and type(result.seed) is int
        fits &= isinstance(result.recipe, dict) and isinstance(result.facts, dict)
        if not fits or not {"digest", "commit"} <= result.plan.keys():
            raise ValueError("arm, seed, recipe, plan and facts are of other types")
        return result
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is not the result of a cell: {error}") from error


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


@dataclass(frozen=True)
class ScreenDesign:
    """Levels of every factor, interactions, and the levels of every arm."""

    levels: Levels
    interactions: Sequence[tuple[str, str]]
    arms: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Study:
    """A plan with its results and verdicts, as plain values: what pages read.

    state: whether the plan is registered, in words. arms: in the plan's order. sd: expected
    deviation of the paired differences of the primary contrasts. least, most: seeds. first: those
    from whose deviation their number follows, if it does. seeds: those that all arms have. open:
    whether the stopping rule asks for more.
    """

    name: str
    title: str
    question: str
    state: str
    alpha: float
    margins: Mapping[str, float]
    sd: float | None
    least: int
    most: int
    first: int | None
    seeds: int
    open: bool
    arms: Sequence[str]
    screens: Mapping[str, ScreenDesign]
    judged: Sequence[Judged]
    results: Sequence[CellResult]

    def values(self, arm: str, metric: str, when: str = "trained") -> list[float]:
        """One measure of an arm over its seeds, in their order."""
        own = sorted((r for r in self.results if r.arm == arm), key=lambda r: r.seed)
        found = [getattr(result, when).get(metric) for result in own]
        return [value for value in found if value is not None]
