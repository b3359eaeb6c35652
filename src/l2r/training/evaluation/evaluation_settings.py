"""Settings of an evaluation and what they may be; read without torch, before anything is loaded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from l2r.errors import InputError

# NOTE: the paper does not say at what length it evaluates; 2048 is the default of the in-loop
# evaluation that OLMoE was trained with.
DEFAULT_MAX_LENGTH = 2048


@dataclass(frozen=True)
class Windows:
    """``context`` tokens go through the model, and ``stride`` further on as many again.

    Every token is scored once, in the first window that holds it, so with at least
    ``context - stride`` tokens before it, or all there are. Raises ValueError for other sizes.
    """

    context: int
    stride: int

    def __post_init__(self) -> None:
        if self.context < 2:  # one token predicts nothing
            raise InputError(f"length must be >= 2; got {self.context}")
        if not 1 <= self.stride < self.context:
            raise InputError(
                f"stride must lie between 1 and {self.context - 1}, so that every window begins "
                f"with tokens that are scored already; got {self.stride}"
            )

    def over(self, length: int) -> Iterator[tuple[int, int, int]]:
        """(start, first that is scored, end) of each window; the first token of all is given."""
        start, scored = 0, 1
        while scored < length:
            end = min(start + self.context, length)
            yield start, scored, end
            start, scored = start + self.stride, end


def model_length(config: Any) -> int:
    """2048, or the model's own length where that is less."""
    own = getattr(config.get_text_config(), "max_position_embeddings", None)
    return min(DEFAULT_MAX_LENGTH, own or DEFAULT_MAX_LENGTH)


@dataclass(frozen=True)
class TextSettings:
    """length: tokens of context, 2048 or the model's own if shorter by default. stride: how far
    windows lie apart, half of the length by default. limit: first documents of each file.
    """

    length: int | None = None
    stride: int | None = None
    limit: int | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.stride is not None or self.length is not None:  # what can be said without a model
            self._windows(self.length or DEFAULT_MAX_LENGTH)

    def windows(self, config: Any) -> Windows:
        """Windows for a model. Raises ValueError for sizes that do not fit."""
        return self._windows(model_length(config) if self.length is None else self.length)

    def _windows(self, length: int) -> Windows:
        return Windows(length, length // 2 if self.stride is None else self.stride)


@dataclass(frozen=True)
class TaskSettings:
    """Settings that change an accuracy besides the weights; see :func:`evaluate_tasks`."""

    split: str = "val"
    limit: int | None = None
    requests: int | None = None
    max_length: int | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.split not in ("val", "test"):
            raise InputError(f"split must be val or test; got {self.split!r}")
        for name, least in (("limit", 1), ("requests", 1), ("max_length", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                option = name.removeprefix("max_")
                raise InputError(f"{option} must be >= {least}; got {value}")
        if self.limit is not None and self.requests is not None:
            raise InputError(f"give limit or requests, not both; got {self.limit}, {self.requests}")
