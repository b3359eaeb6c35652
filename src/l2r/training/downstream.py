"""Downstream tasks on the model in training: the curves of MMLU and HellaSwag against tokens."""

from pathlib import Path

from torch import nn

from l2r.checkpoints.loading import hugging_face_tokenizer
from l2r.evaluation.downstream import evaluate_tasks
from l2r.evaluation.results import paper_row
from l2r.evaluation.tasks import select_tasks
from l2r.evaluation.tokenizer import task_tokenizer
from l2r.recipes.schema import EvaluationSection


class Questions:
    """The tasks of a recipe, checked before training starts.

    Raises ValueError for an unknown task, or where no tokenizer fits the model.
    """

    def __init__(self, section: EvaluationSection, tokenizer: Path | None, vocab_size: int) -> None:
        self.section = section
        self.names = [task.name for task in select_tasks(section.tasks)]
        loaded = None if tokenizer is None else hugging_face_tokenizer(tokenizer)
        self.tokenizer = task_tokenizer(loaded, vocab_size=vocab_size)

    def ask(self, model: nn.Module) -> dict[str, float]:
        """Accuracy by task, as shares of 1, and ``mmlu`` and ``overall`` where all of it ran.

        All ranks call this together; they share the work and all get the result.
        """
        results = evaluate_tasks(
            model,
            self.tokenizer,
            self.names,
            limit=self.section.task_limit,
            batch_size=self.section.batch_size,
        )
        shares = {name: result.accuracy for name, result in results.items()}
        means = paper_row(results).accuracy
        for column in ("MMLU", "Overall"):
            mean = means[column]
            if mean is not None:
                shares[column.lower()] = mean / 100
        return shares
