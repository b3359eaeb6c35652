"""Results of a study in one file, enough to judge and to resume without the run folders.

results.jsonl    a line per cell, ``CellResult`` as JSON, whose ``recipe`` is a digest; before its
                 first use a line gives that recipe: {"digest": ..., "recipe": fields but the seed};
                 null is a measure that is not finite, read as NaN
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from l2r.errors import InputError
from l2r.files.atomic import append_text, lock, plain_json
from l2r.files.reading import parse_json, read_bytes
from l2r_lab.stats.contrasts import Judged
from l2r_lab.stats.effects import Levels

# By name what a cell measures, at its end and at step 0, and what it does of images or text alone.
MEASURES = (
    "train_ce", "validation_ce", "balance", "routing_gain", "shuffled_gain", "load_entropy",
    "max_over_mean", "dead_experts", "top1_entropy", "scale_free_margin", "mean_margin",
    "low_margin_rate", "cosine_variance", "stability", "topk_overlap", "relative_stability",
    "relative_topk_overlap", "logit_spread", "weight_sum", "first_experts", "flipped_decisions",
    "flipped_tokens",
)  # fmt: skip
OF_IMAGES = ("top1",)
LOSSES = ("train_ce", "validation_ce")
# Measured at the end alone: by the curve, and of text in other arithmetic.
AT_THE_END = ("train_ce_third_quarter", "train_ce_last_quarter", "train_ce_late_change")
ARITHMETICS = ("bf16", "int8")
OF_TEXT = tuple(
    f"{arithmetic}_{measure}"
    for arithmetic in ARITHMETICS
    for measure in ("flipped_tokens", "ce_change", "kl", "kl_replay_share")
)
_DIGITS = 7  # of stored measures: more than the seeds agree on, less than rounding disturbs


def hardware(facts: Mapping[str, Any]) -> str:
    """Name of what computed: GPUs with their processor, else the processor; times differ by it."""
    processor = str(facts["processor"])
    gpus = ", ".join(dict.fromkeys(facts["gpus"]))
    return f"{gpus} ({processor})" if gpus else processor


_LARGEST = 1e150  # of a measure: its square, which a deviation needs, is a number too


@dataclass(frozen=True)
class CellResult:
    """Measurements of one run.

    trained, untrained: measures at the end and at step 0, by the same names but for those of the
    end alone. curve: (step, mean
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

    def rounded(self) -> "CellResult":
        """Round measures and curve to the digits that files keep."""
        sides = [
            {k: _rounded(v) for k, v in side.items()} for side in (self.trained, self.untrained)
        ]
        curve = [(step, _rounded(loss)) for step, loss in self.curve]
        return replace(self, trained=sides[0], untrained=sides[1], curve=curve)


class StudyResults:
    """Results of one study in its folder: the file results.jsonl.

    Several processes may append at the same time. A last line that a kill cut off is ignored, and
    removed by the next append; of two results of one cell the first counts.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.jsonl"

    def read(self) -> list[CellResult]:
        """All results, in the order of the file; none without a file.

        Raises ValueError, naming the line, for a file that holds anything else.
        """
        return list(self._parse(self._lines()).values())

    def append(self, *results: CellResult) -> None:
        """Add results, whose cells have none yet, while this process holds the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with lock(self.path):
            lines = self._lines()
            whole = sum(map(len, lines))
            if self.path.stat().st_size > whole:
                os.truncate(self.path, whole)
            there = self._parse(lines)
            digests = {_digest(_without_seed(result.recipe)) for result in there.values()}
            text = []
            for result in results:
                if (result.arm, result.seed) in there:
                    raise InputError(
                        f"{self.path} has a result of {result.arm}, seed {result.seed}"
                    )
                shared = _without_seed(result.recipe)
                digest = _digest(shared)
                if digest not in digests:
                    text.append(_line({"digest": digest, "recipe": shared}))
                    digests.add(digest)
                text.append(_line({**asdict(result.rounded()), "recipe": digest}))
                there[result.arm, result.seed] = result
            append_text(self.path, "".join(text))

    def _lines(self) -> list[bytes]:
        """Whole lines of the file."""
        if not self.path.is_file():
            return []
        return [line for line in read_bytes(self.path).splitlines(True) if line.endswith(b"\n")]

    def _parse(self, lines: Sequence[bytes]) -> dict[tuple[str, int], CellResult]:
        recipes: dict[str, dict[str, Any]] = {}
        results: dict[tuple[str, int], CellResult] = {}
        for number, line in enumerate(lines, start=1):
            try:
                values = parse_json(line, strict=False)
                if "arm" not in values:
                    recipes[values["digest"]] = dict(values["recipe"])
                    continue
                recipe = {"seed": values["seed"], **recipes[values["recipe"]]}
                result = _result({**values, "recipe": recipe})
                results.setdefault((result.arm, result.seed), result)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                raise InputError(
                    f"line {number} of {self.path} is not the result of a cell: {error!r}"
                ) from error
        return results


def _result(values: dict[str, Any]) -> CellResult:
    values["curve"] = [(int(step), _number(loss)) for step, loss in values["curve"]]
    for name in ("trained", "untrained"):
        values[name] = {metric: _number(value) for metric, value in values[name].items()}
    result = CellResult(**values)
    fits = isinstance(result.arm, str) and type(result.seed) is int
    if not fits or not isinstance(result.facts, dict):
        raise InputError("arm, seed and facts are of other types")
    facts = result.facts
    seconds, packages, gpus = (facts.get(name) for name in ("seconds", "packages", "gpus"))
    if seconds is not None and not isinstance(seconds, (int, float)):
        raise InputError("facts must have seconds as a number or null")
    if not isinstance(packages, dict) or "torch" not in packages:
        raise InputError("facts must have the packages' versions, torch's among them")
    if not isinstance(gpus, list) or "processor" not in facts:
        raise InputError("facts must have a list of gpus and a processor")
    if not {"digest", "commit"} <= result.plan.keys():
        raise InputError("plan must have a digest and a commit")
    return result


def _number(value: Any) -> float:
    number = math.nan if value is None else float(value)
    if math.isfinite(number) and abs(number) > _LARGEST:
        raise InputError(f"measures must lie within +-{_LARGEST:.0e}; got {number}")
    return number


def _without_seed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name != "seed"}


def _digest(recipe: Mapping[str, Any]) -> str:
    text = json.dumps(recipe, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:12]


def _line(values: Mapping[str, Any]) -> str:
    return plain_json(values, indent=None) + "\n"


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
    from whose deviation their number follows, if it does. seeds: those that all arms have. ended:
    why no more are run, where it was ended early. closed: whether no more are run because their
    number was not fixed.
    added_by_training: metrics whose verdicts need that training added the difference, all or
    losses. judge_secondary: whether secondary contrasts have verdicts.
    """

    name: str
    title: str
    question: str
    prediction: str
    state: str
    added_by_training: str
    judge_secondary: bool
    alpha: float
    margins: Mapping[str, float]
    sd: float | None
    least: int
    most: int
    first: int | None
    seeds: int
    ended: str
    closed: bool
    arms: Sequence[str]
    screens: Mapping[str, ScreenDesign]
    judged: Sequence[Judged]
    results: Sequence[CellResult]

    def values(self, arm: str, metric: str, when: str = "trained") -> list[float]:
        """One measure of an arm over its seeds, in their order."""
        own = sorted((r for r in self.results if r.arm == arm), key=lambda r: r.seed)
        found = [getattr(result, when).get(metric) for result in own]
        return [value for value in found if value is not None]

    def router_parameters(self, arm: str) -> int | None:
        """Parameters of all routers of an arm's model, where its results give them."""
        sizes = (r.facts.get("router_parameters") for r in self.results if r.arm == arm)
        return next((size for size in sizes if size is not None), None)
