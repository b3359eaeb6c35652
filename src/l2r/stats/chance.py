"""Chance level of a number: the same number with documents (rows) permuted.

Tokens of a document depend on each other, so whole rows change places and positions stay.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int

from l2r.stats.intervals import Interval

# One more draw of the same kind lies between the least and the largest of n with probability
# (n - 1) / (n + 1): 95%.
DRAWS = 39

Order = Int[np.ndarray, " R"]


def by_chance(rows: int, statistic: Callable[[Order], float]) -> Interval | None:
    """Mean of ``statistic`` over other rows in place of each, and the interval that holds 95%.

    None for a single row, which no other can replace.
    """
    if rows < 2:
        return None
    return summary([statistic(others) for others in other_rows(rows)])


def other_rows(rows: int, draws: int = DRAWS) -> Iterator[Order]:
    """Draw another row for every row, each taken once; always the same draws."""
    generator = np.random.default_rng(0)
    for _ in range(draws):
        circle = generator.permutation(rows)
        others = np.empty(rows, np.int64)
        others[circle] = np.roll(circle, 1)
        yield others


def summary(draws: list[float]) -> Interval:
    """Mean of draws by chance and their ends, which hold 95% where there are ``DRAWS``."""
    return Interval(float(np.mean(draws)), min(draws), max(draws))
