"""Routing of a text, token by token and expert by expert, while a model reads it.

Shape letters: B rows, S tokens of a row, T tokens of a batch, D hidden size, N experts, K experts
chosen per token, M contexts per expert.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from l2r.analysis.certificates.certify import certify_first
from l2r.analysis.diagnostics.data_pass import BatchReading, RouterReducer
from l2r.analysis.diagnostics.settings import TOKENS
from l2r.analysis.diagnostics.streaming_sums import gaps
from l2r.errors import InputError
from l2r.files.arrays import TextRouting
from l2r.hf.checkpoints import token_ids, tokenizer_errors
from l2r.routers import RouterOutput
from l2r.routers.observe import find_routers
from l2r.routers.offload import materialized

CONTEXTS, VOCABULARY = 6, 12  # per expert
_Z = 1.96  # of the 95% interval


class TextTrace(RouterReducer):
    """Routing of a text; ``result`` gives it once all batches were read.

    ``tokens`` are kept one by one, the same number from every domain: whole rows, or the start of
    one. All of the text counts in what an expert's contexts and vocabulary are. Batches hold
    ``input_ids`` [B, S] without padding and ``domain`` [B], positions in ``domains``.
    """

    def __init__(self, model: nn.Module, *, domains: Sequence[str], tokens: int = TOKENS) -> None:
        if tokens < len(domains):
            raise InputError(
                f"text must be at least a token per domain, {len(domains)}, or 0; got {tokens}"
            )
        self._domains = tuple(domains)
        self._tokens = tokens
        self._layers = {name: _Layer(r) for name, r in find_routers(model).items()}
        self._rows: list[Int[Tensor, "B S"]] = []
        self._domain: list[int] = []
        self._shown: list[int] = []
        self._columns = 0
        self._called: set[str] = set()

    def begin(self, reading: BatchReading) -> None:
        """Choose the tokens of the batch that are kept one by one, and note its text."""
        assert reading.domain is not None
        self._called.clear()
        ids, domain = reading.inputs["input_ids"].cpu(), reading.domain.tolist()
        share = self._tokens // len(self._domains)
        self._columns = min(ids.shape[1], share)
        start, keep = len(self._domain), torch.zeros(ids.shape, dtype=torch.bool)
        for row, of in enumerate(domain):
            before = sum(self._domain[shown] == of for shown in self._shown)
            if before < share // self._columns:
                self._shown.append(start + row)
                keep[row, : self._columns] = True
            self._domain.append(of)
        self._rows.append(ids)
        for layer in self._layers.values():
            layer.expect(ids.flatten(), keep.flatten(), start * ids.shape[1])

    def see(self, x: Tensor, output: RouterOutput, where: str) -> None:
        """Count and keep the tokens of one call. Raises ValueError for a second one in a batch."""
        if where in self._called:
            raise InputError(
                f"the router {where} was called twice in a call: its layers run in a loop, and a "
                "token has no single route; use --data with --text-tokens 0"
            )
        self._called.add(where)
        self._layers[where].add(x, output)

    def result(
        self, tokenizer: Any, report: Callable[[int], None] = lambda layers_done: None
    ) -> TextRouting:
        """Return the routing of all text; without a tokenizer tokens are shown as numbers."""
        rows = torch.cat(self._rows)
        ids, tokens = torch.unique(rows, return_inverse=True)
        parts: dict[str, list[np.ndarray]] = {}
        remarks = []
        experts = max(layer.num_experts for layer in self._layers.values())
        chosen = max(layer.kept["experts"][0].shape[1] for layer in self._layers.values())
        for done, layer in enumerate(self._layers.values(), start=1):
            arrays = {name: torch.cat(tensor) for name, tensor in layer.kept.items()}
            radius, remark = _radius(materialized(layer.router), arrays.pop("x"))
            remarks.append(remark)
            of_experts = layer.of_experts(ids, tokens.flatten().bincount())
            more = (0, 0, 0, experts - layer.num_experts)  # layers of fewer experts get rows of -1
            widened = {name: pad(value, more, value=-1) for name, value in of_experts.items()}
            for name, none in (("experts", -1), ("weights", 0)):  # layers of a smaller k
                fewer = chosen - arrays[name].shape[1]
                arrays[name] = pad(arrays[name], (0, fewer), value=none)
            for name, value in {**arrays, **widened, "radius": radius}.items():
                parts.setdefault(name, []).append(value.numpy())
            report(done)
        stacked = {name: np.stack(part) for name, part in parts.items()}
        domain, shown = np.array(self._domain), np.array(self._shown)
        by_domain = np.argsort(domain[shown], kind="stable")
        for name in ("experts", "weights", "margin", "entropy", "radius"):
            tensor = stacked[name]
            grid = tensor.reshape(len(tensor), len(shown), self._columns, *tensor.shape[2:])
            stacked[name] = grid[:, by_domain]
        return TextRouting(
            layers=np.array(list(self._layers)),
            remarks=np.array(remarks),
            domains=np.array(self._domains),
            pieces=np.array(token_pieces(tokenizer, ids.tolist())),
            tokens=tokens.numpy().astype(np.uint32),
            domain=domain,
            shown=shown[by_domain],
            **stacked,
        )


class _Layer:
    """Counts of one router so far."""

    def __init__(self, router: nn.Module) -> None:
        self.router = router
        self.kept: dict[str, list[Tensor]] = {}
        self.num_experts = 0
        self._contexts = torch.empty(0, 0, dtype=torch.int64)  # [N, M]
        self._context_weights = torch.empty(0, 0)  # the same
        self._ids, self._keep, self._start = torch.empty(0), torch.empty(0), 0
        self._pairs = torch.empty(0, dtype=torch.int64)  # token id * N + expert
        self._counts = torch.empty(0, dtype=torch.int64)

    def expect(self, ids: Int[Tensor, " T"], keep: Tensor, start: int) -> None:
        """Set the tokens of the next call, which of them are kept, and the place of the first."""
        self._ids, self._keep, self._start = ids, keep, start

    def add(self, x: Float[Tensor, "*B D"], output: RouterOutput) -> None:
        """Count the tokens of a call, and keep those that are shown."""
        logits, weights, indices = (part.detach().cpu() for part in output)
        if len(logits) != len(self._ids):
            raise ValueError(
                f"a router must see every token once; got {len(logits)} of {len(self._ids)}"
            )
        weights, order = weights.float().sort(dim=1, descending=True, stable=True)
        indices = indices.gather(1, order)
        self.num_experts = logits.shape[1]
        self._count(indices)
        self._rank(weights, indices)
        keep = self._keep
        inputs = x.reshape(len(keep), -1)
        kept = {"x": inputs[keep.to(inputs.device)].cpu(), "weights": weights[keep]}
        kept |= {"experts": indices[keep].to(torch.int16), **decision(logits[keep])}
        for name, value in kept.items():
            self.kept.setdefault(name, []).append(value)

    def of_experts(
        self, ids: Int[Tensor, " V"], occurrences: Int[Tensor, " V"]
    ) -> dict[str, Tensor]:
        """Contexts, and the tokens (positions in ``ids``) that come to each expert most surely."""
        token, expert = self._pairs // self.num_experts, self._pairs % self.num_experts
        position = torch.searchsorted(ids, token)
        low = wilson_low(self._counts, occurrences[position])
        vocabulary = torch.full((self.num_experts, VOCABULARY), -1, dtype=torch.int32)
        counts = torch.zeros_like(vocabulary)
        for number in range(self.num_experts):
            own = (expert == number).nonzero()[:, 0]
            best = own[low[own].argsort(descending=True, stable=True)[:VOCABULARY]]
            vocabulary[number, : len(best)] = position[best].int()
            counts[number, : len(best)] = self._counts[best].int()
        return {
            "contexts": self._contexts.int(),
            "context_weights": self._context_weights,
            "vocabulary": vocabulary,
            "vocabulary_counts": counts,
        }

    def _count(self, indices: Int[Tensor, "T K"]) -> None:
        """Count the tokens of each word at each expert; only pairs that occur take memory."""
        pairs = (self._ids[:, None] * self.num_experts + indices).flatten()
        pairs = torch.cat([self._pairs, pairs])
        counts = torch.cat([self._counts, torch.ones(indices.numel(), dtype=torch.int64)])
        self._pairs, inverse = torch.unique(pairs, return_inverse=True)
        self._counts = torch.zeros_like(self._pairs).scatter_add_(0, inverse, counts)

    def _rank(self, weights: Float[Tensor, "T K"], indices: Int[Tensor, "T K"]) -> None:
        """Keep the M tokens that each expert weighs most."""
        own = torch.full((self.num_experts, len(weights)), -1.0)
        own.T.scatter_(1, indices, weights)
        places = self._start + torch.arange(len(weights)).expand_as(own)
        if self._contexts.numel() == 0:
            self._contexts = torch.full((self.num_experts, CONTEXTS), -1)
            self._context_weights = torch.full((self.num_experts, CONTEXTS), -1.0)
        best, order = torch.cat([self._context_weights, own], dim=1).topk(CONTEXTS, dim=1)
        places = torch.cat([self._contexts, places], dim=1).gather(1, order)
        self._contexts, self._context_weights = places.where(best >= 0, -1), best


def decision(logits: Float[Tensor, "T N"]) -> dict[str, Float[Tensor, " T"]]:
    """``margin``, the gap of the two largest logits, and ``entropy`` of softmax over log N."""
    probs = logits.double().softmax(dim=1)
    entropy = torch.special.entr(probs).sum(dim=1) / math.log(max(2, logits.shape[1]))
    return {"margin": gaps(logits).float(), "entropy": entropy.float()}


def wilson_low(hits: Int[Tensor, " n"], of: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Low end of Wilson's 95% interval of a share: one of one says less than nine of ten."""
    n, share, square = of.double(), hits.double() / of, _Z * _Z
    spread = _Z * (share * (1 - share) / n + square / (4 * n * n)).sqrt()
    return (share + square / (2 * n) - spread) / (1 + square / n)


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Decode tokens as they stand within a sentence, with the space before a word."""
    if tokenizer is None:
        return [f" {number}" for number in ids]
    # Many tokenizers drop the space at the start of a text, so every token follows another.
    before = token_ids(tokenizer, "a", add_special_tokens=False)
    decode = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    with tokenizer_errors():
        start = len(tokenizer.decode(before, **decode))
        return [tokenizer.decode([*before, number], **decode)[start:] for number in ids]


def _radius(router: nn.Module, x: Float[Tensor, "T D"]) -> tuple[Float[Tensor, " T"], str]:
    """Certified radius of the first expert, or NaN and the reason."""
    device = next(router.parameters()).device
    try:
        return certify_first(router, x.to(device)).float().cpu(), ""
    except InputError as error:
        return torch.full((len(x),), torch.nan), str(error)
