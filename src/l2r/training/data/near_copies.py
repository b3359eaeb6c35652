"""Leaves near copies out, so that held-out text is not training text with a word changed."""

from collections.abc import Iterable, Iterator

WORDS = 13
_LIMIT = 0.02


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
    """A number for every 13 words in a row, the same for the same words within one process."""
    words = text.split()
    return [hash(tuple(words[i : i + WORDS])) for i in range(len(words) - WORDS + 1)]
