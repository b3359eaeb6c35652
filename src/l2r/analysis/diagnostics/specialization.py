"""What experts are used for: words, pairs, paths and rare words (OLMoE, arXiv 2409.02060, 5).

Shape letters: R rows, S positions, K experts chosen per token, N experts, W words of the
vocabulary that occur, T tokens, L layers.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Num

from l2r.analysis.diagnostics.choice_log import Choices, Experts, Words
from l2r.analysis.diagnostics.settings import LEAST
from l2r.stats.chance import DRAWS, by_chance, summary
from l2r.stats.entropy import entropy, information, normalized_entropy, table
from l2r.stats.intervals import Interval

BINS = 5  # of word frequency, of as many tokens each
_BURN_IN = 10  # rounds of trades before the first draw


class Share(NamedTuple):
    """A share, what it would be by chance, and the share of each expert (NaN: it has none)."""

    mean: float
    chance: Interval | None
    by_expert: Float[np.ndarray, " N"]


def vocabulary_specialization(
    words: Words, first: Int[np.ndarray, "R S"], num_experts: int, least: int = LEAST
) -> Share | None:
    """Share of a word's occurrences that go to its main expert, mean over words.

    Only words that occur ``least`` times count; OLMoE's own figure counts all (``least=1``), and
    the share of a word that occurs once is 1. An expert's share is the mean over the words whose
    main expert it is. By chance: the words of a document with the choices of another one. None
    where no word occurs often enough.
    """
    names = np.unique(words[words >= 0])
    number = np.where(words >= 0, np.searchsorted(names, words), -1)

    def shares(others: Int[np.ndarray, " R"] | slice) -> Float[np.ndarray, "W N"]:
        counts = table(number, first[others])
        seen = counts.sum(1, keepdims=True)
        return (counts / np.maximum(seen, 1))[seen[:, 0] >= least]

    found = shares(slice(None))
    if not found.size:
        return None
    largest, main = found.max(1), found.argmax(1)
    own = [largest[main == expert] for expert in range(num_experts)]
    by_expert = np.array([part.mean() if part.size else np.nan for part in own])
    chance = by_chance(len(words), lambda others: _mean(shares(others).max(1, initial=0)))
    return Share(float(largest.mean()), chance, by_expert)


class Coactivation(NamedTuple):
    """together [N, N]: P(E_j | E_i), how often expert j is chosen where i is. strongest: that of
    an expert's most frequent partner, mean over experts that are used; chance: the same after
    tokens of different documents traded experts."""

    together: Float[np.ndarray, "N N"]
    strongest: float
    chance: Interval | None


def coactivation(experts: Experts, num_experts: int) -> Coactivation:
    """Expert co-activation: N_ij / N_i over all k experts of a token.

    By chance, experts change places between tokens of different documents, so that every token
    keeps k different experts and every expert its load.
    """
    rows, positions, _ = experts.shape
    chosen = np.zeros((rows, positions, num_experts), bool)
    where = np.indices(experts.shape)[:, experts >= 0]
    chosen[where[0], where[1], experts[experts >= 0]] = True
    together = _together(chosen)
    draws = [_strongest(_together(traded)) for traded in _trades(chosen)]
    return Coactivation(together, _strongest(together), summary(draws) if draws else None)


def _together(chosen: Bool[np.ndarray, "R S N"]) -> Float[np.ndarray, "N N"]:
    flat = chosen.reshape(-1, chosen.shape[-1]).astype(np.float32)
    pairs = flat.T @ flat
    load = pairs.diagonal().copy()
    np.fill_diagonal(pairs, 0)
    return pairs / np.maximum(load, 1)[:, None]


def _strongest(together: Float[np.ndarray, "N N"]) -> float:
    most = together.max(1)
    return _mean(most[most > 0])


def _trades(chosen: Bool[np.ndarray, "R S N"]) -> Iterator[Bool[np.ndarray, "R S N"]]:
    """Draws after many rounds in which the tokens of two documents trade experts at random.

    What both have they keep; the rest is permuted between them (the curveball algorithm).
    """
    rows, generator = len(chosen), np.random.default_rng(0)
    now = chosen.copy()
    for number in range(_BURN_IN + DRAWS if rows > 1 else 0):
        order = generator.permutation(rows)
        one, other = order[: rows // 2], order[rows // 2 : rows // 2 * 2]
        a, b = now[one], now[other]
        real = a.any(2, keepdims=True) & b.any(2, keepdims=True)
        free = np.logical_xor(a, b) & real
        keys = np.where(free, generator.random(free.shape), 2)
        half = free.sum(2, keepdims=True) // 2
        last = np.take_along_axis(np.sort(keys, axis=2), np.maximum(half - 1, 0), axis=2)
        mine = free & (keys <= last)
        now[one], now[other] = (a & ~free) | mine, (b & ~free) | (free & ~mine)
        if number >= _BURN_IN:
            yield now


class Paths(NamedTuple):
    """Paths of first experts through all layers: how many differ, the entropy of the path in
    bits and what it is when every layer reads other documents, and the most frequent."""

    distinct: int
    entropy: float
    chance: Interval | None
    most: list[tuple[list[int], int]]


def paths(choices: Choices, most: int = 10) -> Paths:
    """Paths through the layers, one for each token."""
    firsts = np.stack([experts[..., 0] for experts in choices.experts], axis=-1)
    found, counts = _counted(firsts)
    rows, generator = len(firsts), np.random.default_rng(0)

    def dealt() -> float:
        orders = [generator.permutation(rows) for _ in choices.experts]
        mixed = [firsts[order, :, layer] for layer, order in enumerate(orders)]
        return entropy(_counted(np.stack(mixed, axis=-1))[1])

    chance = summary([dealt() for _ in range(DRAWS)]) if rows > 1 else None
    top = counts.argsort(kind="stable")[::-1][:most]
    listed = [(found[i].tolist(), int(counts[i])) for i in top]
    return Paths(len(counts), entropy(counts), chance, listed)


def _counted(
    firsts: Int[np.ndarray, "R S L"],
) -> tuple[Int[np.ndarray, "P L"], Int[np.ndarray, " P"]]:
    flat = firsts.reshape(-1, firsts.shape[-1])
    return np.unique(flat[(flat >= 0).all(1)], axis=0, return_counts=True)


def path_information(
    before: Int[np.ndarray, "R S"], after: Int[np.ndarray, "R S"]
) -> tuple[float, Interval | None]:
    """Information in bits between a token's first experts of two layers in turn, and by chance."""
    chance = by_chance(len(before), lambda others: information(table(before, after[others])))
    return information(table(before, after)), chance


class Frequency(NamedTuple):
    """bins [B, 4]: from rare words to frequent ones, of as many tokens each: tokens, mean
    occurrences of their words, entropy of the load of their first experts over log N (1 for one
    expert), mean margin over spread. margin: rank correlation of a token's margin and its word's
    occurrences."""

    bins: Float[np.ndarray, "B 4"]
    margin: float


def frequency_dependence(
    words: Words, first: Int[np.ndarray, "R S"], margin: Float[np.ndarray, "R S"], num_experts: int
) -> Frequency:
    """Differences of routing between rare and frequent words of the data."""
    real = (words >= 0) & (first >= 0)
    _, number, counts = np.unique(words[real], return_inverse=True, return_counts=True)
    often, chosen, gaps = counts[number], first[real], margin[real].astype(np.float64)
    rows = []
    for part in np.array_split(often.argsort(kind="stable"), BINS):
        load = np.bincount(chosen[part], minlength=num_experts)
        even = normalized_entropy(load) if part.size else np.nan
        rows.append([part.size, _mean(often[part]), even, _mean(gaps[part])])
    return Frequency(np.array(rows, float), _correlation(_ranks(often), _ranks(gaps)))


def _ranks(values: Num[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
    """Rank of each value; equal ones share the mean of theirs."""
    _, number, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[number]


def _correlation(a: Float[np.ndarray, " T"], b: Float[np.ndarray, " T"]) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size > 0 else 0.0


def _mean(values: Num[np.ndarray, " T"]) -> float:
    return float(values.mean()) if values.size else 0.0
