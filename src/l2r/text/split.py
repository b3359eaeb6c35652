"""Split of documents into training and held-out text: a function of the text alone.

Nothing depends on shards, workers or kills, and copies of a document all land on the same side,
so that no held-out text is trained on. Near copies are left out of the embedded corpus, so that
held-out text is not training text with a word changed.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from l2r.errors import InputError

TRAIN_PART, VALIDATION, TOKENIZER = "train", "validation", "tokenizer"
WORDS = 13
_LIMIT = 0.02


@dataclass(frozen=True)
class Split:
    """hold_out: share of the documents that is held out for validation.

    share: share of the other documents that is kept for training. A larger share contains a
    smaller one, and the held-out documents are the same under every share.
    """

    hold_out: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.hold_out < 1:
            raise InputError(f"hold_out must be >= 0 and < 1; got {self.hold_out}")
        if not 0 < self.share <= 1:
            raise InputError(f"share must be > 0 and <= 1; got {self.share}")

    def folders(self, out: Path) -> dict[str, Path]:
        """Folder of each part; training tokens lie in ``out`` itself where nothing is held out."""
        if self.hold_out == 0:
            return {TRAIN_PART: out}
        return {TRAIN_PART: out / TRAIN_PART, VALIDATION: out / VALIDATION}

    def part(self, text: str) -> str | None:
        """``train``, ``validation``, or None for a document that is left out."""
        if self == EVERYTHING:
            return TRAIN_PART
        place = position(text)
        if place < self.hold_out:
            return VALIDATION
        end = self.hold_out + self.share * (1 - self.hold_out)
        return TRAIN_PART if self.share == 1 or place < end else None


def position(text: str) -> float:
    """Place of a text in [0, 1), by a hash: uniform over texts, the same for its copies."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53  # exact


EVERYTHING = Split()


def without_near_copies(
    files: Iterable[tuple[str, str]], limit: float = _LIMIT
) -> Iterator[tuple[str, str]]:
    """Files in their order, without those that share text with a larger one that stays.

    A file goes where more than ``limit`` of its 13-grams of words are found in larger ones.
    """
    everything = list(files)
    seen: set[int] = set()
    left_out: set[int] = set()
    for index in sorted(range(len(everything)), key=lambda i: -len(everything[i][1])):
        own = word_grams(everything[index][1])
        if sum(gram in seen for gram in own) > limit * len(own):
            left_out.add(index)
        else:
            seen.update(own)
    return (file for index, file in enumerate(everything) if index not in left_out)


def word_grams(text: str) -> list[int]:
    """Hash every 13 words in a row, the same words to the same number within one process."""
    words = text.split()
    return [hash(tuple(words[i : i + WORDS])) for i in range(len(words) - WORDS + 1)]
