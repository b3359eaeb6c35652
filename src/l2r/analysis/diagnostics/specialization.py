"""Uses of experts: words, pairs, paths, rare words and saturation (OLMoE, arXiv 2409.02060, 5).

First one function for each analysis of single tokens' choices, then what a diagnosis keeps of
them, layer by layer and for the model; last the saturation over checkpoints (5.1).

Shape letters: R rows, S positions, K experts chosen per token, N experts, W words of the
vocabulary that occur, T tokens, L layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Num

from l2r.analysis.diagnostics.choice_log import Choices, Words
from l2r.analysis.diagnostics.settings import MIN_OCCURRENCES
from l2r.errors import InputError
from l2r.files.diagnosis import Array, Diagnosis, same_tokens
from l2r.stats.agreement import ExpertChoices, Overlap, overlap, overlap_by_chance
from l2r.stats.chance import DRAWS, by_chance, summary
from l2r.stats.entropy import entropy, information, normalized_entropy, table
from l2r.stats.intervals import Interval

BINS = 5  # of word frequency, of as many tokens each
_CODES = 2**62  # numbers that stand for paths stay below
_BURN_IN = 10  # rounds of trades before the first draw
Analyses = tuple[dict[str, Any], dict[str, Array]]


class Share(NamedTuple):
    """A share, what it would be by chance, and the share of each expert (NaN: it has none)."""

    mean: float
    chance: Interval | None
    by_expert: Float[np.ndarray, " N"]


def vocabulary_specialization(
    words: Words, first: Int[np.ndarray, "R S"], num_experts: int, least: int = MIN_OCCURRENCES
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


def coactivation(experts: ExpertChoices, num_experts: int) -> Coactivation:
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
    """Find the different paths, in the order of their experts, and count the tokens of each."""
    flat = firsts.reshape(-1, firsts.shape[-1])
    flat = flat[(flat >= 0).all(1)]
    experts = int(flat.max(initial=0)) + 1
    code = np.zeros(len(flat), np.int64)  # of the path so far, in the order of paths
    for column in flat.T:
        if code.max(initial=0) >= _CODES // experts:
            code = np.unique(code, return_inverse=True)[1]
        code = code * experts + column
    _, place, counts = np.unique(code, return_index=True, return_counts=True)
    return flat[place], counts


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


def layer_analyses(choices: Choices, layer: int, least: int) -> Analyses:
    """Numbers and arrays of one layer; those of words are absent for images."""
    experts, count = choices.experts[layer], choices.num_experts
    first = experts[..., 0]
    pairs = coactivation(experts, count)
    numbers = {"coactivation": pairs.strongest, **_chance("coactivation", pairs.chance)}
    arrays: dict[str, Array] = {"experts": experts, "coactivation": pairs.together}
    if layer > 0:
        told, chance = path_information(choices.experts[layer - 1][..., 0], first)
        numbers |= {"path_information": told, **_chance("path_information", chance)}
    for name, words in _words(choices).items():
        share = vocabulary_specialization(words, first, count, least)
        if share is not None:
            numbers[f"vocabulary_{name}"] = share.mean
            numbers |= _chance(f"vocabulary_{name}", share.chance)
            arrays[f"vocabulary_{name}"] = share.by_expert
    if choices.words is not None:
        rare = frequency_dependence(choices.words, first, choices.margin[layer], count)
        numbers["frequency_margin"] = rare.margin
        arrays["frequency"] = rare.bins
    return numbers, arrays


def model_analyses(
    choices: Choices, layers: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[tuple[list[int], int]]]:
    """Numbers of the paths through all layers, and the most frequent ones with their tokens.

    ``layers`` has the numbers of each layer; of the information between two of them the mean.
    """
    found = paths(choices)
    numbers: dict[str, Any] = {"distinct_paths": found.distinct, "path_entropy": found.entropy}
    for name in ("path_information", "path_information_by_chance"):
        values = [layer[name] for layer in layers if name in layer]
        if values:
            numbers[name] = sum(values) / len(values)
    return {**numbers, **_chance("path_entropy", found.chance)}, found.most


def _words(choices: Choices) -> dict[str, Words]:
    """Words that a token's choice may follow: its own, the next one and the model's guess."""
    if choices.words is None:
        return {}
    following = np.full_like(choices.words, -1)
    following[:, :-1] = choices.words[:, 1:]
    told = {"input": choices.words, "next": following}
    return told if choices.predicted is None else {**told, "predicted": choices.predicted}


def _chance(name: str, chance: Interval | None) -> dict[str, float]:
    if chance is None:
        return {}
    ends = {"": chance.mean, "_low": chance.low, "_high": chance.high}
    return {f"{name}_by_chance{end}": value for end, value in ends.items()}


def saturation(
    earlier: Mapping[Any, Sequence[ExpertChoices]], last: Sequence[ExpertChoices]
) -> dict[str, list[Any]]:
    """Overlap of each checkpoint's choices, by its name, with those of the last, by layer.

    top1, topk [checkpoints][layers], and top1_by_chance, topk_by_chance [layers]: of the last
    with itself in other documents. Raises ValueError for choices of other tokens.
    """
    for name, layers in earlier.items():
        if [layer.shape for layer in layers] != [layer.shape for layer in last]:
            raise InputError(
                f"checkpoints over time must be of one model on the same tokens; {name} differs "
                "from the last in layers, experts per token or data"
            )
    found = [
        [overlap(*pair) for pair in zip(layers, last, strict=True)] for layers in earlier.values()
    ]
    chance = [overlap_by_chance(layer, layer) for layer in last]
    result: dict[str, list[Any]] = {"checkpoints": list(earlier)}
    for side, name in enumerate(Overlap._fields):
        result[name] = [[layer[side] for layer in layers] for layers in found]
        if None not in chance:
            result[f"{name}_by_chance"] = [layer[side] for layer in chance if layer is not None]
    return result


def saturation_of_diagnoses(views: Mapping[str, Diagnosis]) -> dict[str, list[Any]]:
    """Saturation over diagnosed checkpoints, by name, against the last of them.

    Raises ValueError where they did not read the same tokens.
    """
    *_, last = views.values()
    other = [name for name, view in views.items() if not same_tokens(view, last)]
    if other:
        raise InputError(f"over-time needs checkpoints that read the same tokens; not {other[0]}")
    experts = {name: view.by_layer("experts") for name, view in views.items()}
    return saturation(experts, last.by_layer("experts"))
