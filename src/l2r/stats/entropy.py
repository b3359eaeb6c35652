"""Entropy of counts, and the information that a table of pairs of labels holds.

Shape letters: R rows, S positions, N and M labels.
"""

import math

import numpy as np
from jaxtyping import Float, Int


def entropy(counts: Float[np.ndarray, " N"]) -> float:
    """Entropy of counts as shares, in bits."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def normalized_entropy(counts: Float[np.ndarray, " N"]) -> float:
    """Entropy of counts as shares, divided by log N; 1 for one entry or an empty count."""
    if len(counts) < 2 or counts.sum() <= 0:
        return 1.0
    return entropy(counts) / math.log2(len(counts))


def table(
    first: Int[np.ndarray, "R S"], second: Int[np.ndarray, "R S"]
) -> Float[np.ndarray, "N M"]:
    """Count each pair of labels, over places where both have one (not -1)."""
    real = (first >= 0) & (second >= 0)
    a, b = first[real].astype(np.int64), second[real].astype(np.int64)
    shape = (int(first.max()) + 1, int(second.max()) + 1)
    return np.bincount(a * shape[1] + b, minlength=shape[0] * shape[1]).reshape(shape) * 1.0


def information(counts: Float[np.ndarray, "N M"]) -> float:
    """Mutual information of a table of counts, in bits."""
    return entropy(counts.sum(1)) + entropy(counts.sum(0)) - entropy(counts.ravel())
