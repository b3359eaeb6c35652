"""Evaluation: downstream tasks, perplexity, accuracy.

Imports hf/, data/ and below. Begin at checkpoint.py (a whole evaluation) or perplexity.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.training.evaluation.downstream import evaluate_tasks as evaluate_tasks
    from l2r.training.evaluation.evaluation_settings import TaskSettings as TaskSettings
    from l2r.training.evaluation.evaluation_settings import TextSettings as TextSettings
    from l2r.training.evaluation.paired import paired_row as paired_row
    from l2r.training.evaluation.paper_rows import TASK_COLUMNS as TASK_COLUMNS
    from l2r.training.evaluation.paper_rows import paper_row as paper_row
    from l2r.training.evaluation.perplexity import token_losses as token_losses
    from l2r.training.evaluation.tasks import select_tasks as select_tasks
    from l2r.training.evaluation.text import Texts as Texts
    from l2r.training.evaluation.text import evaluate_text as evaluate_text
    from l2r.training.evaluation.text_loss import ALL_FILES as ALL_FILES
    from l2r.training.evaluation.text_loss import text_differences as text_differences
    from l2r.training.evaluation.text_loss import text_losses as text_losses
    from l2r.training.evaluation.whole_checkpoint import EVALUATION_FILE as EVALUATION_FILE
    from l2r.training.evaluation.whole_checkpoint import evaluate_images as evaluate_images
    from l2r.training.evaluation.whole_checkpoint import evaluate_language as evaluate_language
else:
    __getattr__, __dir__ = lazy_names(__name__)
