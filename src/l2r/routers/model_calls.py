"""Tokens of a model's call: padding, labels, packed documents.

Shape letters: B rows of a batch, S its columns, T = B * S tokens as a router sees them.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor, nn

from l2r.errors import InputError

NO_LABEL = -100  # a token that no loss is computed of, as in torch's cross-entropy
_PACKED = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q")  # borders of documents, from 0 to T


@dataclass(frozen=True, eq=False)
class ModelCall:
    """Arguments of one call that tell its tokens apart; None where the call has none.

    padding [B, S]: the 2-D attention mask. labels [B, S]. positions [B, S] or [1, S]: position ids.
    borders: cumulative lengths of packed documents. rows: B. gradients: whether they were on.
    """

    padding: Tensor | None = None
    labels: Tensor | None = None
    positions: Tensor | None = None
    borders: Tensor | None = None
    rows: int = 1
    gradients: bool = True

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "ModelCall":
        """Return the call of ``model`` with these arguments."""
        if args:
            kind: Any = type(model)
            kwargs = {**dict(zip(_names(kind), args, strict=False)), **kwargs}
        borders = (kwargs.get(name) for name in _PACKED)
        return cls(
            _matrix(kwargs.get("attention_mask")),
            _matrix(kwargs.get("labels")),
            _matrix(kwargs.get("position_ids")),
            next((b for b in borders if isinstance(b, Tensor) and b.dim() == 1), None),
            _rows(kwargs),
            torch.is_grad_enabled(),
        )

    def real(self, tokens: int) -> Bool[Tensor, " T"] | None:
        """Tokens that are no padding; None where all are, or where ``tokens`` are others."""
        if self.padding is None or self.padding.numel() != tokens:
            return None
        return self.padding.reshape(-1).bool()

    def trained(self, tokens: int) -> Bool[Tensor, " T"] | None:
        """Tokens that are no padding and have a label; None where all are so."""
        real = self.real(tokens)
        if self.labels is None or self.labels.numel() != tokens:
            return real
        labeled = self.labels.reshape(-1) != NO_LABEL
        return labeled if real is None else labeled & real.to(labeled.device)

    def aligned(
        self, name: str, values: Tensor, tokens: int, fill: float = 0.0
    ) -> Shaped[Tensor, " T"]:
        """Return a number for each token from one for each, in any shape, or for the last columns.

        [B, C] with C below S stands at the end of the rows, as completions do; the rest is
        ``fill``. Raises ValueError, with the ``name`` of what was given, for other shapes.
        """
        if values.numel() == tokens:
            return values.reshape(-1)
        columns = tokens // self.rows
        fits = values.dim() == 2 and len(values) == self.rows and values.shape[1] < columns
        if not fits or self.rows * columns != tokens:
            raise InputError(
                f"{name} must have a number for each of the {tokens} tokens of a call, or "
                f"[{self.rows}, columns] for the last columns of its rows; got "
                f"{list(values.shape)}"
            )
        whole = values.new_full((self.rows, columns), fill)
        whole[:, columns - values.shape[1] :] = values
        return whole.reshape(-1)

    def documents(self, tokens: int, device: torch.device) -> Int[Tensor, " T"]:
        """Count the the document that each token is of, from 0 on.

        Documents begin at the borders, or with each row and where positions do not rise.
        """
        first = torch.zeros(tokens, dtype=torch.int64, device=device)
        if self.borders is not None:
            starts = self.borders[:-1].to(device=device, dtype=torch.int64)
            first.index_fill_(0, starts[starts < tokens], 1)
        else:
            grid = first.view(self.rows if tokens % self.rows == 0 else 1, -1)
            grid[:, 0] = 1
            if self.positions is not None and self.positions.shape[-1] == grid.shape[1]:
                positions = self.positions.to(device)
                grid[:, 1:] = (positions[:, 1:] <= positions[:, :-1]).long()
        return (first.cumsum(0) - 1).clamp_min(0)


def _matrix(value: Any) -> Tensor | None:
    return value if isinstance(value, Tensor) and value.dim() == 2 else None


def _rows(kwargs: Mapping[str, Any]) -> int:
    inputs = (kwargs.get(name) for name in ("input_ids", "inputs_embeds", "pixel_values"))
    return next((len(x) for x in inputs if isinstance(x, Tensor) and x.dim() > 1), 1)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]
