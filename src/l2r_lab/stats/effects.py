"""Main effects and interactions of a screen, by least squares over its cells and seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from jaxtyping import Float

from l2r.stats.intervals import Interval

Levels = Mapping[str, Sequence[str]]  # factor -> its levels, the first to compare with


@dataclass(frozen=True)
class Effect:
    """Change of a metric from a factor's first level to ``level``, or by an interaction.

    An interaction is what one more step of both factors adds to the sum of their effects.
    """

    factor: str
    level: str
    change: Interval


def effects_of(
    levels: Levels,
    interactions: Sequence[tuple[str, str]],
    cells: Sequence[Sequence[str]],
    seeds: Sequence[int],
    values: Sequence[float],
) -> list[Effect]:
    """Effects from one row per run: the levels of its cell, its seed and its value.

    The model is a mean per seed, an effect per level and a product of steps per interaction; what
    it leaves is the error, lack of fit included. Raises ValueError where runs do not separate the
    effects apart, or none is left for the error.
    """
    from scipy.stats import t

    names, columns = design(levels, interactions, cells)
    blocks = np.array([[seed == other for other in sorted(set(seeds))] for seed in seeds], float)
    matrix = np.hstack([columns, blocks])
    rank, freedom = int(np.linalg.matrix_rank(matrix)), len(values) - matrix.shape[1]
    if rank < matrix.shape[1] or freedom < 1:
        raise ValueError(
            f"{len(cells)} runs do not separate {len(names)} effects; more cells or seeds do"
        )
    inverse = np.linalg.inv(matrix.T @ matrix)
    coefficients = inverse @ matrix.T @ np.array(values)
    error = float(np.sum((np.array(values) - matrix @ coefficients) ** 2)) / freedom
    wide = t.ppf(0.975, freedom) * np.sqrt(error * np.diag(inverse))
    return [
        Effect(factor, level, Interval(float(m), float(m - h), float(m + h)))
        for (factor, level), m, h in zip(names, coefficients, wide, strict=False)  # seeds come last
    ]


def best_by_fit(
    levels: Levels, interactions: Sequence[tuple[str, str]], effects: Sequence[Effect]
) -> tuple[tuple[str, ...], float]:
    """Find the cell, run or not, for which effects predict the least, and its change from that of
    all first levels."""
    cells = list(product(*levels.values()))
    _, columns = design(levels, interactions, cells)
    predicted = columns @ np.array([effect.change.mean for effect in effects])
    least = int(predicted.argmin())
    return cells[least], float(predicted[least] - predicted[0])


def design(
    levels: Levels, interactions: Sequence[tuple[str, str]], cells: Sequence[Sequence[str]]
) -> tuple[list[tuple[str, str]], Float[np.ndarray, "C E"]]:
    """Names of the effects, and their column of every cell."""
    factors = list(levels)
    steps = {
        factor: np.array([list(levels[factor]).index(cell[i]) for cell in cells], float)
        for i, factor in enumerate(factors)
    }
    names = [(factor, level) for factor in factors for level in levels[factor][1:]]
    columns = [steps[f] == list(levels[f]).index(level) for f, level in names]
    for one, two in interactions:
        names.append((f"{one} x {two}", "one more step of both"))
        middle = [(len(levels[f]) - 1) / 2 for f in (one, two)]
        columns.append((steps[one] - middle[0]) * (steps[two] - middle[1]))
    return names, np.array(columns, float).T
