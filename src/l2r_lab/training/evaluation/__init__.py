"""Evaluation: the paper's downstream tasks, accuracy.

Begin at whole_checkpoint.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r_lab.training.evaluation.accuracy import evaluate_accuracy as evaluate_accuracy
    from l2r_lab.training.evaluation.downstream import evaluate_tasks as evaluate_tasks
    from l2r_lab.training.evaluation.paired import paired_row as paired_row
    from l2r_lab.training.evaluation.paper_rows import TASK_COLUMNS as TASK_COLUMNS
    from l2r_lab.training.evaluation.paper_rows import paper_row as paper_row
    from l2r_lab.training.evaluation.task_settings import TaskSettings as TaskSettings
    from l2r_lab.training.evaluation.task_tokenizers import task_tokenizer as task_tokenizer
    from l2r_lab.training.evaluation.tasks import select_tasks as select_tasks
    from l2r_lab.training.evaluation.whole_checkpoint import EVALUATION_FILE as EVALUATION_FILE
    from l2r_lab.training.evaluation.whole_checkpoint import evaluate_images as evaluate_images
    from l2r_lab.training.evaluation.whole_checkpoint import evaluate_language as evaluate_language
else:
    __getattr__, __dir__ = lazy_names(__name__)
