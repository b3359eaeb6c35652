"""The paper's full-results row (Table 14) from task results."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from l2r.stats.intervals import Interval, mean_share
from l2r_lab.training.evaluation.task_scoring import TaskResult
from l2r_lab.training.evaluation.tasks import MMLU_TASKS, PAPER_TASKS

# Column -> the tasks that it is the mean of.
TASKS_OF = {
    **{task.column: (task,) for task in MMLU_TASKS},
    "MMLU": MMLU_TASKS,
    **{task.column: (task,) for task in PAPER_TASKS[len(MMLU_TASKS) :]},
    "Overall": PAPER_TASKS,
}
TASK_COLUMNS = tuple(TASKS_OF)
# Accuracy of guessing in percent: BoolQ and PIQA have two answers, the others four.
CHANCE = {
    column: sum(100 / task.answers for task in tasks) / len(tasks)
    for column, tasks in TASKS_OF.items()
}


@dataclass(frozen=True)
class PaperRow:
    """Accuracies in percent, by column; None where a task was not run.

    standard_error: as others report it, 0 where none or all of the documents are right.
    interval: accuracy with its 95% interval, which has a width there too.
    """

    accuracy: dict[str, float | None]
    standard_error: dict[str, float | None]
    interval: dict[str, Interval | None]


def paper_row(results: Mapping[str, TaskResult]) -> PaperRow:
    """Columns of the paper's table: MMLU is the mean of its four groups, Overall of all eight.

    Overall counts each MMLU group as one task, as the paper's numbers do. The error and the
    interval of a mean take its tasks as independent.
    """
    accuracy: dict[str, float | None] = dict.fromkeys(TASK_COLUMNS)
    error: dict[str, float | None] = dict.fromkeys(TASK_COLUMNS)
    interval: dict[str, Interval | None] = dict.fromkeys(TASK_COLUMNS)
    for column, tasks in TASKS_OF.items():
        parts = [results[task.name] for task in tasks if task.name in results]
        if len(parts) == len(tasks):
            accuracy[column] = 100 * sum(r.accuracy for r in parts) / len(parts)
            squares = sum(r.standard_error**2 for r in parts)
            error[column] = 100 * math.sqrt(squares) / len(parts)
            mean = mean_share([(r.hits, r.documents) for r in parts])
            interval[column] = Interval(*(100 * value for value in mean))
    return PaperRow(accuracy, error, interval)
