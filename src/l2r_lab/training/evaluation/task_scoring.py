"""Scores requests: the log-likelihood of each candidate answer, by the library's own metric."""

import dataclasses
import inspect
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Float
from olmo_eval import ICLMetric
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.routers.offload import device_of


@dataclass(frozen=True)
class Request:
    """One scored answer of one document.

    score: log-likelihood, divided by the answer's characters where the task normalizes.
    score_without_space: the same without counting the space before the answer, as the first
        OLMoE code and lm-evaluation-harness divide.
    """

    document: int
    answer: int
    label: int
    score: float
    score_without_space: float


@torch.no_grad()
def score_batch(model: nn.Module, batch: dict[str, Tensor], metric_type: str) -> list[Request]:
    """Score one collated batch. The model must be in evaluation mode."""
    device = device_of(model)
    moved = {name: value.to(device) for name, value in batch.items()}
    metric = ICLMetric(metric_type)
    metric.update(
        # Our logits begin at the answer, so the metric must cut nothing off.
        {**moved, "ctx_len": torch.ones_like(moved["ctx_len"])},
        answer_logits(model, moved["input_ids"], moved["ctx_len"] - 1, moved["cont_len"]),
    )
    states = zip(
        metric.labels,
        metric.loglikelihoods,
        metric.loglikelihoods_no_leading_space,
        strict=True,
    )
    return [
        Request(document, answer, label, score, short)
        for (document, answer, label), (_, _, score), (_, _, short) in states
    ]


def answer_logits(
    model: nn.Module, input_ids: Tensor, starts: Tensor, lengths: Tensor
) -> Float[Tensor, "B A V"]:
    """Logits [B, A, V] of the positions that predict the answers; A is the longest answer.

    Row b holds positions ``starts[b] .. starts[b] + lengths[b]``; what follows in a row is 0.
    Equal inputs go through the model once (answers of one token share all of theirs), and only
    the union of the positions goes through the vocabulary projection.
    """
    inputs, source = torch.unique(input_ids, dim=0, return_inverse=True)
    spans = [
        torch.arange(s, s + n, device=input_ids.device)
        for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    keep = torch.unique(torch.cat(spans))
    # Padding is on the right, where a causal model never looks, so no mask is needed.
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits = model(input_ids=inputs, use_cache=False, logits_to_keep=keep).logits
    else:
        logits = model(input_ids=inputs, use_cache=False).logits[:, keep]
    rows = logits.new_zeros(len(spans), int(lengths.max()), logits.shape[-1], dtype=torch.float32)
    for row, span in enumerate(spans):
        first = int(torch.searchsorted(keep, span[0]))
        rows[row, : len(span)] = logits[source[row], first : first + len(span)].float()
    return rows


@dataclass(frozen=True)
class ScoredDocument:
    """One question with the score of each candidate answer, in order; label is the right one."""

    document: int
    label: int
    scores: tuple[float, ...]

    @property
    def hit(self) -> bool:
        """Tell whether the highest score is the right answer's; ties go to the first, as usual."""
        return self.scores.index(max(self.scores)) == self.label


@dataclass(frozen=True)
class TaskResult:
    """Accuracy of one task, as shares of 1.

    accuracy: the library's metric (answer length counted with the space before it).
    accuracy_without_space: the same with the length counted without it; equal for tasks that do
        not normalize.
    standard_error: of ``accuracy`` over documents; NaN for a single document.
    truncated: requests whose context lost its beginning.
    scored: every document, for comparisons by pairs; kept in a separate file.
    """

    task: str
    accuracy: float
    standard_error: float
    accuracy_without_space: float
    documents: int
    truncated: int
    scored: tuple[ScoredDocument, ...] = ()

    @property
    def hits(self) -> int:
        """Documents whose labeled answer has the highest score."""
        return round(self.accuracy * self.documents)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON, without the single documents."""
        values = asdict(dataclasses.replace(self, scored=()))
        del values["scored"]
        if math.isnan(self.standard_error):
            values["standard_error"] = None
        return values

    @classmethod
    def from_dict(
        cls, values: dict[str, Any], scored: tuple[ScoredDocument, ...] = ()
    ) -> "TaskResult":
        """Read what ``to_dict`` wrote and add the documents."""
        error = math.nan if values["standard_error"] is None else values["standard_error"]
        return cls(**{**values, "standard_error": error, "scored": scored})


def summarize(task: str, requests: Sequence[Request], *, truncated: int = 0) -> TaskResult:
    """Accuracy over documents: the answer with the highest score must be the labeled one.

    Ties go to the first answer, as in the library. Requests scored twice count once. Raises
    ValueError when there are none, or when a score is not a number.
    """
    if not requests:
        raise ValueError(f"task {task} has no scored requests")
    if any(math.isnan(request.score) for request in requests):
        raise InputError(f"the model gives log-likelihoods that are not numbers on task {task}")
    unique = {(r.document, r.answer): r for r in requests}
    documents: dict[int, list[Request]] = {}
    for _, request in sorted(unique.items()):
        documents.setdefault(request.document, []).append(request)
    scored, short = (
        tuple(
            ScoredDocument(document, answers[0].label, tuple(score(r) for r in answers))
            for document, answers in documents.items()
        )
        for score in (attrgetter("score"), attrgetter("score_without_space"))
    )
    count = len(scored)
    accuracy = sum(d.hit for d in scored) / count
    error = math.sqrt(accuracy * (1 - accuracy) / (count - 1)) if count > 1 else math.nan
    return TaskResult(
        task, accuracy, error, sum(d.hit for d in short) / count, count, truncated, scored
    )
