"""Which texts of a domain train and which are held out, and where a domain is cut.

A file of text or a document of a shard is the unit. Since version 2 its text alone decides: every
cut of a domain holds out texts that no other cut trains on. Version 1, whose hold-out changed with
the cut, is kept for the runs and the registered studies that were made with it.
"""

import hashlib
from collections.abc import Iterable, Iterator

from l2r.training.data.split import position

NEWEST = 2
HELD_OUT = 0.1
Texts = list[tuple[str, str]]  # name and text


def split_files(
    files: Iterable[tuple[str, str]],
    characters: int,
    *,
    domain: str = "text",
    version: int = NEWEST,
) -> tuple[Texts, Texts]:
    """Training and held-out texts of a domain, cut to ``characters`` together.

    Held out are texts whose hash is in the lowest tenth: at least the lowest of all, never the
    highest. A tenth of the characters is theirs. Raises ValueError where one side has no text.
    """
    if version == 1:
        train, validation = _split_after_cut(files, characters)
    else:
        train, validation = _split_before_cut(files, characters)
    if not train or not validation:
        raise ValueError(
            f"domain {domain!r} must hold at least two different texts, one to train on and one "
            f"held out; got {len(train) + len(validation)}"
        )
    return train, validation


def _split_before_cut(files: Iterable[tuple[str, str]], characters: int) -> tuple[Texts, Texts]:
    places = [(position(text), name, text) for name, text in files if text.strip()]
    lowest, highest = min(places, default=(0.0,))[0], max(places, default=(0.0,))[0]
    train: Texts = []
    validation: Texts = []
    for place, name, text in places:
        held = place == lowest or (place < HELD_OUT and place < highest)
        (validation if held else train).append((name, text))
    share = max(1, round(characters * HELD_OUT))
    return list(_cut(train, characters - share)), list(_cut(validation, share))


def _split_after_cut(files: Iterable[tuple[str, str]], characters: int) -> tuple[Texts, Texts]:
    """Version 1: every tenth file of the cut, in the order of a hash of its name."""
    ranked = sorted(_cut(files, characters), key=lambda f: hashlib.sha256(f[0].encode()).digest())
    held_out = max(1, len(ranked) // 10)
    return ranked[held_out:], ranked[:held_out]


def _cut(files: Iterable[tuple[str, str]], characters: int) -> Iterator[tuple[str, str]]:
    """Files in hash order until ``characters`` are reached, so that a cut domain stays mixed."""
    for name, text in sorted(files, key=lambda f: hashlib.sha256(f"cut {f[0]}".encode()).digest()):
        if characters <= 0:
            return
        yield name, text[:characters]
        characters -= len(text)
