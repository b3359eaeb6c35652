"""Differences of two checkpoints by pairs: the arithmetic, the interval, what is refused."""

import dataclasses

import numpy as np
import pytest

from l2r_lab.training.evaluation.paired import paired_row
from l2r_lab.training.evaluation.task_scoring import ScoredDocument, TaskResult
from l2r_lab.training.evaluation.tasks import MMLU_TASKS, PAPER_TASKS


def result(hits, task="piqa"):
    scored = tuple(ScoredDocument(number, 0, (float(hit), 0.5)) for number, hit in enumerate(hits))
    return TaskResult(task, sum(hits) / len(hits), 0.0, 0.0, len(hits), 0, scored)


def difference(first, second):
    return paired_row({"piqa": first}, {"piqa": second})["PIQA"]


def test_difference_and_interval_by_hand():
    # 10 documents: the second alone is right on 3, the first alone on 1.
    first, second = result([1, 1, 1, 1, 0, 0, 0, 0, 0, 0]), result([1, 1, 1, 0, 1, 1, 1, 0, 0, 0])
    found = difference(first, second)
    assert found.difference == pytest.approx(second.accuracy - first.accuracy) == 0.2
    # Half a document more in each outcome: 3.5 against 1.5 of 12.
    center, error = 2 / 12, (5 - 2**2 / 12) ** 0.5 / 12
    assert found.low == pytest.approx(center - 1.959964 * error, abs=1e-6)
    assert found.high == pytest.approx(center + 1.959964 * error, abs=1e-6)
    turned = difference(second, first)
    assert turned == pytest.approx((-found.difference, -found.high, -found.low))


def test_equal_models_differ_by_nothing_but_not_for_certain():
    few, many = ([0, 1] * n for n in (5, 500))
    for hits in (few, many):
        found = difference(result(hits), result(hits))
        assert found.difference == 0 and found.low == -found.high < 0
    assert found.high < difference(result(few), result(few)).high / 10


def test_pairs_see_what_two_independent_errors_hide():
    """Right on the same documents but for 20 of 1000, of which the second has 18."""
    rng = np.random.default_rng(0)
    first = rng.random(1000) < 0.5
    second = first.copy()
    second[np.flatnonzero(~first)[:18]] = True
    second[np.flatnonzero(first)[:2]] = False
    found = difference(result(first.tolist()), result(second.tolist()))
    unpaired = 1.96 * sum(a.mean() * (1 - a.mean()) / 1000 for a in (first, second)) ** 0.5
    assert found.difference == pytest.approx(0.016) and found.low > 0
    assert found.difference - unpaired < 0


def test_interval_covers_as_often_as_it_says():
    rng, rounds, covered, truth = np.random.default_rng(1), 400, 0, 0.08 - 0.04
    for _ in range(rounds):
        draw = rng.random(60)
        first, second = draw < 0.54, (draw < 0.50) | (draw >= 0.92)
        found = difference(result(first.tolist()), result(second.tolist()))
        covered += found.low <= truth <= found.high
    # 95% less three standard errors of a share of 400 rounds.
    assert covered / rounds > 0.95 - 3 * (0.95 * 0.05 / rounds) ** 0.5


def test_row_has_the_papers_columns_and_means():
    rng = np.random.default_rng(2)
    runs = [
        {t.name: result((rng.random(50) < p).tolist(), t.name) for t in PAPER_TASKS}
        for p in (0.3, 0.6)
    ]
    row = paired_row(*runs)
    each = [row[task.column].difference for task in PAPER_TASKS]
    assert row["Overall"].difference == pytest.approx(np.mean(each))
    assert row["MMLU"].difference == pytest.approx(np.mean(each[: len(MMLU_TASKS)]))
    # The mean of eight independent estimates: its width is that of their squares.
    widths = np.array([row[task.column].high - row[task.column].low for task in PAPER_TASKS])
    expected = np.sqrt((widths**2).sum()) / len(PAPER_TASKS)
    assert row["Overall"].high - row["Overall"].low == pytest.approx(expected)
    part = paired_row(runs[0], {"piqa": runs[1]["piqa"]})
    assert part == {"PIQA": row["PIQA"]}


def test_other_documents_are_refused():
    whole = result([1, 0, 1])
    for other in (result([1, 0]), dataclasses.replace(whole, scored=())):
        with pytest.raises(ValueError, match=r"piqa must be of the same documents; got 3 and"):
            difference(whole, other)
