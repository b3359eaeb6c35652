"""Split of a domain's texts into training and held-out text, and its cut.

A file of text or a document of a shard is the unit. Since version 2 its text alone decides: every
cut of a domain holds out texts that no other cut trains on. Version 1, whose hold-out changed with
the cut, is kept for the runs and the registered studies that were made with it.
"""

import hashlib
import heapq
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from l2r.errors import InputError
from l2r.text.split import position

NEWEST = 2
HELD_OUT = 0.1
NamedTexts = list[tuple[str, str]]  # name and text


def split_files(
    files: Iterable[tuple[str, str]],
    characters: int,
    *,
    domain: str = "text",
    version: int = NEWEST,
) -> tuple[NamedTexts, NamedTexts]:
    """Training and held-out texts of a domain, cut to ``characters`` together.

    Held out are texts whose hash is in the lowest tenth: at least the lowest of all, never the
    highest. A tenth of the characters is theirs. Raises ValueError where one side has no text.
    """
    if version == 1:
        train, validation = _split_after_cut(files, characters)
    else:
        train, validation = _split_before_cut(files, characters)
    if not train or not validation:
        raise InputError(
            f"domain {domain!r} must hold at least two different texts, one to train on and one "
            f"held out; got {len(train) + len(validation)}: split a long file into several"
        )
    return train, validation


class _Named(NamedTuple):
    """rank: of the text in a cut, the first the largest. length: of the whole text."""

    rank: tuple[int, int]
    name: str
    text: str
    length: int


class _Cut:
    """Texts in hash order until ``characters`` are reached, so that a cut domain stays mixed.

    No more than that is ever kept, and one text, however many are added.
    """

    def __init__(self, characters: int) -> None:
        self._characters = characters
        self._length = 0
        self.kept: list[_Named] = []

    def add(self, one: _Named) -> None:
        heapq.heappush(self.kept, one._replace(text=one.text[: max(0, self._characters)]))
        self._length += one.length
        while self.kept and self._length - self.kept[0].length >= self._characters:
            self._length -= heapq.heappop(self.kept).length

    def texts(self) -> NamedTexts:
        texts, left = [], self._characters
        for _, name, text, length in sorted(self.kept, reverse=True):
            texts.append((name, text[:left]))
            left -= length
        return texts


class _Side:
    """Texts of one side of a split, of which those at one end may have to go to the other side.

    budgets: characters of this side and of the other. end: -1, the lowest place, or 1, the highest.
    """

    def __init__(self, budgets: tuple[int, int], end: int) -> None:
        self._own, self._any = budgets[0], max(budgets)
        self._sign, self._place = end, -math.inf
        self._end, self._rest = _Cut(self._any), _Cut(self._own)

    @property
    def is_empty(self) -> bool:
        return self._place == -math.inf

    def add(self, place: float, one: _Named) -> None:
        if self._sign * place > self._place:
            former, self._end = self._end, _Cut(self._any)
            self._place = self._sign * place
            for text in former.kept:
                self._rest.add(text)
        (self._end if self._sign * place == self._place else self._rest).add(one)

    def all(self) -> NamedTexts:
        """Texts of this side, those at the end too."""
        for text in self._end.kept:
            self._rest.add(text)
        return self._rest.texts()

    def parted(self, characters: int) -> tuple[NamedTexts, NamedTexts]:
        """Texts that stay, and those at the end, cut to the other side's characters."""
        given = _Cut(characters)
        for text in self._end.kept:
            given.add(text)
        return self._rest.texts(), given.texts()


def _split_before_cut(
    files: Iterable[tuple[str, str]], characters: int
) -> tuple[NamedTexts, NamedTexts]:
    share = max(1, round(characters * HELD_OUT))
    low, high = _Side((share, characters - share), 1), _Side((characters - share, share), -1)
    for one in _named(files):
        place = position(one.text)
        if one.text.strip():
            (low if place < HELD_OUT else high).add(place, one)
    if low.is_empty:
        return high.parted(share)
    if high.is_empty:
        validation, train = low.parted(characters - share)
        return train, validation
    return high.all(), low.all()


def _split_after_cut(
    files: Iterable[tuple[str, str]], characters: int
) -> tuple[NamedTexts, NamedTexts]:
    """Version 1: every tenth file of the cut, in the order of a hash of its name."""
    cut = _Cut(characters)
    for one in _named(files):
        cut.add(one)
    ranked = sorted(cut.texts(), key=lambda named: _digest(named[0]))
    held_out = max(1, len(ranked) // 10)
    return ranked[held_out:], ranked[:held_out]


def _digest(name: str) -> bytes:
    """Hash a file's name, whose bytes need not be UTF-8."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def _named(files: Iterable[tuple[str, str]]) -> Iterator[_Named]:
    for number, (name, text) in enumerate(files):
        digest = _digest(f"cut {name}")
        yield _Named((-int.from_bytes(digest), -number), name, text, len(text))
