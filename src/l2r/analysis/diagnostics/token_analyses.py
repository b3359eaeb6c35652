"""The analyses of single tokens' choices, as numbers and arrays of a diagnosis."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from l2r.analysis.diagnostics import specialization as of
from l2r.analysis.diagnostics.choice_log import Choices, Words
from l2r.runs.diagnosis import Array
from l2r.stats.intervals import Interval

Analyses = tuple[dict[str, Any], dict[str, Array]]


def layer_analyses(choices: Choices, layer: int, least: int) -> Analyses:
    """Numbers and arrays of one layer; those of words are absent for images."""
    experts, count = choices.experts[layer], choices.num_experts
    first = experts[..., 0]
    pairs = of.coactivation(experts, count)
    numbers = {"coactivation": pairs.strongest, **_chance("coactivation", pairs.chance)}
    arrays: dict[str, Array] = {"experts": experts, "coactivation": pairs.together}
    if layer > 0:
        told, chance = of.path_information(choices.experts[layer - 1][..., 0], first)
        numbers |= {"path_information": told, **_chance("path_information", chance)}
    for name, words in _words(choices).items():
        share = of.vocabulary_specialization(words, first, count, least)
        if share is not None:
            numbers[f"vocabulary_{name}"] = share.mean
            numbers |= _chance(f"vocabulary_{name}", share.chance)
            arrays[f"vocabulary_{name}"] = share.by_expert
    if choices.words is not None:
        rare = of.frequency_dependence(choices.words, first, choices.margin[layer], count)
        numbers["frequency_margin"] = rare.margin
        arrays["frequency"] = rare.bins
    return numbers, arrays


def model_analyses(
    choices: Choices, layers: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[tuple[list[int], int]]]:
    """Numbers of the paths through all layers, and the most frequent ones with their tokens.

    ``layers`` has the numbers of each layer; of the information between two of them the mean.
    """
    paths = of.paths(choices)
    numbers: dict[str, Any] = {"distinct_paths": paths.distinct, "path_entropy": paths.entropy}
    for name in ("path_information", "path_information_by_chance"):
        values = [layer[name] for layer in layers if name in layer]
        if values:
            numbers[name] = sum(values) / len(values)
    return {**numbers, **_chance("path_entropy", paths.chance)}, paths.most


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
