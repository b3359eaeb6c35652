"""Loss on text, all but the model: settings and windows, sums over documents, differences.

Needs no torch, so that settings are checked before anything is loaded. Documents are what was
drawn, so errors are over documents: a document counts as much as it is long, and what its tokens
have in common is no further evidence.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from l2r.errors import InputError
from l2r.stats.intervals import Ratio, ratio_of_sums

# NOTE: the paper does not say at what length it evaluates; 2048 is the default of the in-loop
# evaluation that OLMoE was trained with.
DEFAULT_MAX_LENGTH = 2048
ALL_FILES = "in all"
_BIT = math.log(2)


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
class TextDocument:
    """A document and its minus log-probability in nats, of all tokens.

    file, document: what was read, and the document's name there. bytes: of its text in UTF-8.
    ids: a digest of its tokens, equal where two tokenizers read it alike.
    """

    file: str
    document: str
    nats: float
    tokens: int
    bytes: int
    ids: str


@dataclass(frozen=True)
class TextLoss:
    """Sums and ratios over documents; without text there are no ratios. empty: of the documents."""

    documents: int
    empty: int
    tokens: int
    bytes: int
    nats_per_token: Ratio | None
    bits_per_byte: Ratio | None

    @property
    def perplexity(self) -> float | None:
        """exp of the nats per token; None without tokens, or beyond the largest number."""
        try:
            return None if self.nats_per_token is None else math.exp(self.nats_per_token.value)
        except OverflowError:
            return None

    def to_dict(self) -> dict[str, Any]:
        """All numbers for JSON, with None for what is not there."""
        counts = {n: getattr(self, n) for n in ("documents", "empty", "tokens", "bytes")}
        return {
            **counts,
            "nats_per_token": _plain(self.nats_per_token),
            "perplexity": self.perplexity,
            "bits_per_byte": _plain(self.bits_per_byte),
        }


@dataclass(frozen=True)
class TextDifference:
    """The second less the first; nats per token only where both read the same tokens."""

    nats_per_token: Ratio | None
    bits_per_byte: Ratio | None

    def to_dict(self) -> dict[str, Any]:
        """Both for JSON."""
        return {n: _plain(getattr(self, n)) for n in ("nats_per_token", "bits_per_byte")}


def text_losses(documents: Sequence[TextDocument]) -> dict[str, TextLoss]:
    """Compute the losses by file, and ``ALL_FILES`` last."""
    return {name: _loss(part) for name, part in _by_file(documents).items()}


def text_differences(
    first: Sequence[TextDocument], second: Sequence[TextDocument]
) -> dict[str, TextDifference]:
    """Compute the differences by file, and ``ALL_FILES`` last, document by document.

    Raises ValueError unless both are of the same documents.
    """
    if [(d.file, d.document, d.bytes) for d in first] != [
        (d.file, d.document, d.bytes) for d in second
    ]:
        raise InputError(
            "two checkpoints are compared on the same documents; got "
            f"{len(first)} and {len(second)} that are not the same"
        )
    others = _by_file(second)
    return {name: _difference(part, others[name]) for name, part in _by_file(first).items()}


def _by_file(documents: Sequence[TextDocument]) -> dict[str, list[TextDocument]]:
    parts: dict[str, list[TextDocument]] = {}
    for document in documents:
        parts.setdefault(document.file, []).append(document)
    return {**parts, ALL_FILES: list(documents)}


def _loss(documents: Sequence[TextDocument]) -> TextLoss:
    full = [document for document in documents if document.bytes]
    return TextLoss(
        documents=len(documents),
        empty=len(documents) - len(full),
        tokens=sum(d.tokens for d in full),
        bytes=sum(d.bytes for d in full),
        nats_per_token=_ratio([d.nats for d in full], [d.tokens for d in full]),
        bits_per_byte=_ratio([d.nats / _BIT for d in full], [d.bytes for d in full]),
    )


def _difference(first: Sequence[TextDocument], second: Sequence[TextDocument]) -> TextDifference:
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a.bytes]
    more = [b.nats - a.nats for a, b in pairs]
    alike = all(a.ids == b.ids for a, b in pairs)
    return TextDifference(
        _ratio(more, [a.tokens for a, _ in pairs]) if alike else None,
        _ratio([nats / _BIT for nats in more], [a.bytes for a, _ in pairs]),
    )


def _ratio(tops: Sequence[float], bottoms: Sequence[int]) -> Ratio | None:
    return ratio_of_sums(tops, bottoms) if sum(bottoms) else None


def _plain(ratio: Ratio | None) -> dict[str, float | None] | None:
    if ratio is None:
        return None
    return {n: None if math.isnan(value) else value for n, value in ratio._asdict().items()}
