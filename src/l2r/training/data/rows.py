"""Which rows of token files stand for all of them."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from l2r.training.data.tokens import TokenDataset

ChooseRows = Callable[[TokenDataset, int], Int[np.ndarray, " rows"]]


def spread_evenly(size: int, count: int) -> Int[np.ndarray, " rows"]:
    """At most ``count`` positions in ``range(size)``, in order, the first and the last included."""
    return np.linspace(0, size - 1, min(size, count)).astype(np.int64)


def even_rows(dataset: TokenDataset, count: int) -> Int[np.ndarray, " rows"]:
    """At most ``count`` rows in order, spread evenly over all files: domains by their size."""
    return spread_evenly(len(dataset), count)


def balanced_rows(dataset: TokenDataset, count: int) -> Int[np.ndarray, " rows"]:
    """``count`` rows in order, the same number from every domain, spread evenly over its files.

    Numbers differ by one where ``count`` is no multiple of the domains. A domain with fewer rows
    gives all, and the others share the rest; every domain that has a row gives at least one, even
    where that makes more than ``count``.
    """
    parts = [dataset.domain_rows(domain) for domain in dataset.domains]
    sizes = [sum(map(len, ranges)) for ranges in parts]
    chosen = [
        _rows_at(ranges, spread_evenly(size, share))
        for ranges, size, share in zip(parts, sizes, _shares(sizes, count), strict=True)
        if share
    ]
    return np.sort(np.concatenate(chosen))


def name_domains_without_rows(dataset: TokenDataset, report: Callable[[str], None]) -> None:
    """Report every domain whose files hold no whole row."""
    for domain in dataset.domains:
        if not any(dataset.domain_rows(domain)):
            report(too_small_domain(domain, dataset.sequence_length))


def too_small_domain(domain: str, length: int) -> str:
    """The line that names a domain with too few tokens."""
    return f"domain {domain} holds less than one row of {length} tokens: it is left out"


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """``count`` dealt as evenly as ``sizes`` allow, at least one for each that is not 0."""
    shares = [0] * len(sizes)
    left = max(count, sum(size > 0 for size in sizes))
    smallest_first = sorted(range(len(sizes)), key=lambda index: sizes[index])
    for done, index in enumerate(smallest_first):
        shares[index] = min(sizes[index], left // (len(sizes) - done))
        left -= shares[index]
    return shares


def _rows_at(
    ranges: Sequence[range], positions: Int[np.ndarray, " rows"]
) -> Int[np.ndarray, " rows"]:
    """Rows at ``positions`` of the ranges joined."""
    ends = np.cumsum([len(part) for part in ranges])
    which = np.searchsorted(ends, positions, side="right")
    first = np.array([part.start for part in ranges]) - ends + [len(part) for part in ranges]
    return first[which] + positions
