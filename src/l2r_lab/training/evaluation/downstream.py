"""Evaluates a causal language model on the paper's downstream tasks."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch.distributed as dist
from torch import nn

from l2r.errors import InputError
from l2r.routers.observe import evaluating
from l2r.text import model_length
from l2r_lab.training.evaluation.store import TaskStore
from l2r_lab.training.evaluation.task_scoring import Request, TaskResult, score_batch, summarize
from l2r_lab.training.evaluation.task_tokenizers import task_tokenizer
from l2r_lab.training.evaluation.tasks import EvaluationTask, Split, build_requests, select_tasks

_PADDED = 128  # the library's rows have a multiple of so many tokens


def evaluate_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str] = "paper",
    *,
    limit: int | None = None,
    requests: int | None = None,
    batch_size: int = 8,
    split: Split = "val",
    max_length: int | None = None,
    store: TaskStore | None = None,
    on_progress: Callable[[str, int, int], None] = lambda task, done, total: None,
) -> dict[str, TaskResult]:
    """Accuracy per task; with torch.distributed the ranks share the work and all get the result.

    model: any Hugging Face causal language model, in training or evaluation mode.
    tokenizer: its Hugging Face tokenizer; None for a model with OLMoE's vocabulary.
    tasks: names, ``mmlu`` or ``paper``.
    limit: first documents of each task. requests: first scored answers instead (a document has
        two or four); the paper's table is consistent with 1024.
    max_length: longer contexts lose their beginning; by default 2048, or less where the model
        ends earlier.
    store: where a single process keeps progress.
    on_progress: gets (task, requests done, requests in all).

    Raises ValueError for unknown tasks, impossible sizes, or a tokenizer that does not fit.
    """
    check_batch_size(batch_size)
    read = read_tasks(
        tokenizer,
        model.config,
        tasks,
        limit=limit,
        requests=requests,
        split=split,
        max_length=max_length,
        store=store,
    )
    return score_tasks(model, read, batch_size=batch_size, store=store, on_progress=on_progress)


def check_batch_size(batch_size: int) -> None:
    """Raise ValueError for a batch size below 1."""
    if batch_size < 1:
        raise InputError(f"batch_size must be >= 1; got {batch_size}")


def read_tasks(
    tokenizer: Any,
    config: Any,
    tasks: str | Sequence[str] = "paper",
    *,
    limit: int | None = None,
    requests: int | None = None,
    split: Split = "val",
    max_length: int | None = None,
    store: TaskStore | None = None,
) -> list[tuple[EvaluationTask, Any]]:
    """Tasks with their requests, tokenized, or the result of one that ``store`` has finished.

    Options and errors are those of ``evaluate_tasks``; ``config`` is the model's.
    """
    chosen = select_tasks(tasks)
    if limit is not None and requests is not None:
        raise InputError(f"give limit or requests, not both; got {limit} and {requests}")
    reader = task_tokenizer(tokenizer, vocab_size=config.get_text_config().vocab_size)
    length = model_length(config) if max_length is None else max_length
    read = []
    for task in chosen:
        documents = _documents(task, limit, requests)
        finished = store.finished(task.name) if store is not None else None
        sizes: Any = {"split": split, "max_length": length, "limit": documents}
        read.append((task, finished or build_requests(task, reader, **sizes)))
    return read


def input_lengths(read: Sequence[tuple[EvaluationTask, Any]]) -> list[int]:
    """Tokens of every input that the model reads for tasks that are not finished, with padding."""
    datasets = [dataset for _, dataset in read if not isinstance(dataset, TaskResult)]
    inputs = (query for d in datasets for query in {tuple(s["query"]) for s in d.samples})
    return [_PADDED * -(-len(query) // _PADDED) for query in inputs]


def score_tasks(
    model: nn.Module,
    read: Sequence[tuple[EvaluationTask, Any]],
    *,
    batch_size: int,
    store: TaskStore | None,
    on_progress: Callable[[str, int, int], None],
) -> dict[str, TaskResult]:
    """Results by task of what ``read_tasks`` gave."""
    options: Any = {"batch_size": batch_size, "store": store, "on_progress": on_progress}
    with evaluating(model):
        return {
            task.name: found
            if isinstance(found, TaskResult)
            else _evaluate(model, task, found, **options)
            for task, found in read
        }


def _documents(task: EvaluationTask, limit: int | None, requests: int | None) -> int | None:
    if requests is None:
        return limit
    if requests < task.answers:
        raise InputError(f"requests must be >= {task.answers} for {task.name}; got {requests}")
    return requests // task.answers


def _evaluate(
    model: nn.Module,
    task: EvaluationTask,
    dataset: Any,
    *,
    batch_size: int,
    store: TaskStore | None,
    on_progress: Callable[[str, int, int], None],
) -> TaskResult:
    # Longest first: rows of a batch are of one length, and memory trouble shows at once.
    samples = sorted(dataset.samples, key=lambda s: (-len(s["query"]), s["doc_id"], s["cont_id"]))
    scored = store.resume(task.name) if store is not None else []
    seen = {(r.document, r.answer) for r in scored}
    left = [s for s in samples if (s["doc_id"], s["cont_id"]) not in seen]
    # Requests with one input (answers of a single token) are scored by one row of a batch.
    rows = [list(group) for _, group in groupby(left, key=lambda s: s["query"])]
    batches = [
        [sample for row in rows[i : i + batch_size] for sample in row]
        for i in range(0, len(rows), batch_size)
    ]
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    # Every rank runs the same number of batches: sharded models gather weights in each forward.
    # What is scored twice counts once.
    for step in range(0, len(batches), ranks):
        batch = batches[min(step + rank, len(batches) - 1)]
        new = score_batch(model, dataset.collate_fn(batch), dataset.metric_type)
        scored += new
        if store is not None:
            store.add(task.name, new)
        count = sum(len(b) for b in batches[: step + ranks])
        on_progress(task.name, len(seen) + count, len(samples))
    cut = sum(s["ctx_len"] < len(s["ctx"]) for s in samples)
    result = summarize(task.name, _from_all_ranks(scored), truncated=cut)
    if store is not None:
        store.finish(task.name, result)
    return result


def _from_all_ranks(scored: list[Request]) -> list[Request]:
    if not dist.is_initialized():
        return scored
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, scored)
    return [request for part in gathered for request in part]
