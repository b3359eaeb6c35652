"""Experts that every token chose in every layer, on a grid of rows and positions.

What follows of single tokens (their words, their paths through layers, what another router did
with the same ones) needs more than sums; here are the choices, of a bounded number of tokens.

Shape letters: R rows (sequences or images), S positions, T tokens, K experts chosen per token.
"""

import dataclasses
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.analysis.diagnostics.data_pass import BatchReading, DataBatch, RouterReducer, Run, read
from l2r.analysis.diagnostics.streaming_sums import margins
from l2r.routers import RouterOutput
from l2r.stats.agreement import ExpertChoices

Words = Int[np.ndarray, "R S"]


@dataclasses.dataclass(frozen=True)
class Choices:
    """experts: by layer, the heaviest first and -1 where there is no token. margin: by layer, the
    gap of the two best logits over their deviation. words: input tokens, and ``predicted`` those
    that the model guesses to follow; None where it reads no text. data: checksum of the inputs.
    """

    num_experts: int
    experts: tuple[ExpertChoices, ...]
    margin: tuple[Float[np.ndarray, "R S"], ...]
    words: Words | None
    predicted: Words | None
    data: int


class ChoiceLog(RouterReducer):
    """Choices of every router of a model, batch by batch.

    Above ``limit`` tokens it keeps every second row only, then every fourth, and so on: the rows
    are spread evenly and are the same for every model that reads the same batches.
    """

    def __init__(self, limit: int = 1 << 16) -> None:
        self.limit = limit
        self._every, self._rows, self._data = 1, 0, 0
        self._experts = 0
        self._seen: dict[str, tuple[Tensor, Tensor]] = {}
        self._kept: dict[str, list[np.ndarray]] = {}
        self._numbers: list[np.ndarray] = []

    def see(self, x: Tensor, output: RouterOutput, where: str) -> None:
        """Note what a router chose for each token, the heaviest expert first."""
        logits, weights, indices = output
        order = weights.argsort(dim=1, descending=True, stable=True)
        self._experts = max(self._experts, logits.shape[1])
        kind = torch.int8 if self._experts < 128 else torch.int16
        self._seen[where] = indices.gather(1, order).to(kind), margins(logits)[1].half()

    def end(self, reading: BatchReading, output: Any) -> None:
        """Keep the choices of the batch that just ran; tokens outside its mask do not count."""
        inputs, mask = reading.inputs, reading.mask
        values = next(iter(inputs.values()))
        read = values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        self._data = zlib.crc32(read, self._data)
        numbers = np.arange(self._rows, self._rows + len(values))
        self._rows += len(values)
        fields: dict[str, Tensor] = {}
        for name, (experts, margin) in self._seen.items():
            if len(experts) % len(values):
                raise ValueError(
                    f"choices need as many tokens in every row; router {name} saw {len(experts)} "
                    f"in {len(values)} rows"
                )
            fits = mask is not None and mask.numel() == len(experts)
            no_token = ~mask.reshape(-1, 1).bool() if mask is not None and fits else None
            valid = experts if no_token is None else experts.masked_fill(no_token, -1)
            fields[f"experts.{name}"] = valid.view(len(values), -1, experts.shape[1])
            fields[f"margin.{name}"] = margin.view(len(values), -1)
        words, logits = inputs.get("input_ids"), getattr(output, "logits", None)
        if words is not None:
            fields["words"] = words.int()
            if logits is not None and logits.shape[:-1] == words.shape:
                fields["predicted"] = logits.argmax(-1).int()
        chosen = numbers % self._every == 0
        self._numbers.append(numbers[chosen])
        for name, value in fields.items():
            self._kept.setdefault(name, []).append(value.cpu().numpy()[chosen])
        self._seen.clear()
        while self._tokens() > self.limit and sum(map(len, self._numbers)) > 1:
            self._every *= 2
            for parts in self._kept.values():
                parts[:] = [
                    p[n % self._every == 0] for p, n in zip(parts, self._numbers, strict=True)
                ]
            self._numbers = [n[n % self._every == 0] for n in self._numbers]

    def choices(self) -> Choices:
        """All that was kept. Raises ValueError before the first batch."""
        if not self._kept:
            raise ValueError("choices need at least 1 batch; got 0")
        grids = {name: _joined(parts) for name, parts in self._kept.items()}
        return Choices(
            self._experts,
            tuple(grid for name, grid in grids.items() if name.startswith("experts.")),
            tuple(grid for name, grid in grids.items() if name.startswith("margin.")),
            grids.get("words"),
            grids.get("predicted"),
            self._data,
        )

    def _tokens(self) -> int:
        return sum(part[..., 0].size for part in next(iter(self._kept.values())))


def choices_of(model: nn.Module, batches: Iterable[DataBatch], run: Run) -> Choices:
    """Choices without sums; ``run`` calls the model as ``read`` does."""
    log = ChoiceLog()
    read(model, batches, [log], run=run)
    return log.choices()


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """All rows in one array; shorter ones are filled up with -1, no token."""
    longest = max(part.shape[1] for part in parts)
    filled = []
    for part in parts:
        more = [(0, 0), (0, longest - part.shape[1]), *[(0, 0)] * (part.ndim - 2)]
        filled.append(np.pad(part, more, constant_values=-1))
    return np.concatenate(filled)
