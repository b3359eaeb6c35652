"""Numbers of a model on text: nats per token, perplexity, bits per byte, and their differences.

Documents are what was drawn, so errors are over documents: a document counts as much as it is
long, and what its tokens have in common is no further evidence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from l2r.errors import InputError
from l2r.stats.intervals import Ratio, ratio_of_sums

ALL_FILES = "in all"
_BIT = math.log(2)


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
    """By file, and ``ALL`` last."""
    return {name: _loss(part) for name, part in _by_file(documents).items()}


def text_differences(
    first: Sequence[TextDocument], second: Sequence[TextDocument]
) -> dict[str, TextDifference]:
    """By file, and ``ALL`` last, document by document.

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
