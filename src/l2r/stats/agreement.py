"""Agreement of two routers on the same tokens: of one run as they are, of two up to names.

Experts of two runs are numbered by accident. What holds under any renaming is the mutual
information of their first experts, and the overlap under the best matching of their experts.

Shape letters: R rows (sequences or images), S positions, K experts chosen, N and M experts.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from l2r.stats.chance import other_rows
from l2r.stats.entropy import entropy, information, table

ExpertChoices = Int[np.ndarray, "R S K"]  # the heaviest first, -1 where there is no token


class Overlap(NamedTuple):
    """Share of tokens with the same first expert, and of the k chosen that are the same."""

    top1: float
    topk: float


class Agreement(NamedTuple):
    """information: mutual information of the first experts, adjusted: 0 is chance (documents
    permuted), 1 that each determines the other. matched: share of tokens whose first experts are
    partners in the best matching; by_chance: the same with documents permuted.
    """

    information: float
    matched: float
    by_chance: float


def overlap(first: ExpertChoices, second: ExpertChoices) -> Overlap:
    """Overlap of the choices of two routers with the same experts; OLMoE's router saturation.

    Of the k experts a token chose, the share that the other chose too: |A and B| / k.
    """
    real = (first[..., 0] >= 0) & (second[..., 0] >= 0)
    a, b = first[real], second[real]
    both = (a[:, :, None] == b[:, None, :]).any(axis=2)
    return Overlap(float(np.mean(a[:, 0] == b[:, 0])), float(np.mean(both)))


def overlap_by_chance(first: ExpertChoices, second: ExpertChoices) -> Overlap | None:
    """Overlap that the experts' load alone would give: first against other documents of second."""
    if len(first) < 2:
        return None
    overlaps = [overlap(first, second[others]) for others in other_rows(len(first))]
    return Overlap(*np.mean(overlaps, axis=0).tolist())


def agreement(first: ExpertChoices, second: ExpertChoices) -> Agreement | None:
    """Agreement of two routers up to a renumbering of experts; None for a single row."""
    observed = table(first[..., 0], second[..., 0])
    if len(first) < 2:
        return None
    dealt = [table(first[..., 0], second[r][..., 0]) for r in other_rows(len(first))]
    least = float(np.mean([information(counts) for counts in dealt]))
    most = (entropy(observed.sum(1)) + entropy(observed.sum(0))) / 2
    adjusted = (information(observed) - least) / (most - least) if most > least else 1.0
    by_chance = float(np.mean([matched(counts) for counts in dealt]))
    return Agreement(adjusted, matched(observed), by_chance)


def matched(counts: Float[np.ndarray, "N M"]) -> float:
    """Share of a table's counts on the best matching of its rows and columns."""
    partners = matching(counts)
    columns = np.flatnonzero(partners >= 0)
    return float(counts[partners[columns], columns].sum() / counts.sum())


def matching(counts: Float[np.ndarray, "N M"]) -> Int[np.ndarray, " M"]:
    """Row of each column in the best matching of a table; -1 for a column without one (M > N)."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(counts, maximize=True)
    partners = np.full(counts.shape[1], -1)
    partners[columns] = rows
    return partners
