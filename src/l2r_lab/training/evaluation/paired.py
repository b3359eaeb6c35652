"""Compares two checkpoints on the same documents: which is better, and is it more than chance.

Two accuracies share their documents, so the error of their difference is not that of two
independent numbers: documents that both models get right, or both wrong, say nothing about it.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import NamedTuple

from l2r.errors import InputError
from l2r_lab.training.evaluation.paper_rows import TASKS_OF
from l2r_lab.training.evaluation.task_scoring import TaskResult

_CONFIDENCE = 0.95


class PairedDifference(NamedTuple):
    """Accuracy of the second less that of the first, with its interval, as shares of 1."""

    difference: float
    low: float
    high: float


class _Estimate(NamedTuple):
    difference: float
    center: float
    variance: float


def paired_row(
    first: Mapping[str, TaskResult], second: Mapping[str, TaskResult]
) -> dict[str, PairedDifference]:
    """Differences by column of the paper's table, over documents, by pairs.

    The interval is Agresti and Min's (Statistics in Medicine 24, 2005): half a document is added
    to each of the four outcomes, so that few documents, or models that never differ, do not give
    an interval of width 0. Means take their tasks as independent. Raises ValueError unless both
    were scored on the same documents.
    """
    estimates = {name: _estimate(first[name], second[name]) for name in first if name in second}
    return {
        column: _interval([estimates[task.name] for task in tasks])
        for column, tasks in TASKS_OF.items()
        if all(task.name in estimates for task in tasks)
    }


def _estimate(first: TaskResult, second: TaskResult) -> _Estimate:
    before, after = ({d.document: d.hit for d in result.scored} for result in (first, second))
    if before.keys() != after.keys() or not before:
        raise InputError(
            f"two results of {first.task} must be of the same documents; got {len(before)} and "
            f"{len(after)} documents, {len(before.keys() & after.keys())} of them in both"
        )
    count = len(before)
    won = sum(after[d] and not before[d] for d in before)
    lost = sum(before[d] and not after[d] for d in before)
    padded = count + 2
    differing = won + lost + 1
    variance = (differing - (won - lost) ** 2 / padded) / padded**2
    return _Estimate((won - lost) / count, (won - lost) / padded, variance)


def _interval(estimates: list[_Estimate]) -> PairedDifference:
    count = len(estimates)
    center = sum(e.center for e in estimates) / count
    error = math.sqrt(sum(e.variance for e in estimates)) / count
    reach = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2) * error
    difference = sum(e.difference for e in estimates) / count
    return PairedDifference(difference, max(-1.0, center - reach), min(1.0, center + reach))
