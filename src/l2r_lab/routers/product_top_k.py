"""Best experts of a grid: the score of expert (i, j) is first[i] + second[j].

Shape letters: T tokens, A rows and B columns of the grid, N = A B experts, K experts chosen.
Expert (i, j) has the index i B + j.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from l2r.kernels import dispatch


def product_scores(first: Float[Tensor, "T A"], second: Float[Tensor, "T B"]) -> Tensor:
    """Scores of all experts [T, N]."""
    return (first.unsqueeze(2) + second.unsqueeze(1)).flatten(1)


def product_scores_at(
    first: Float[Tensor, "T A"], second: Float[Tensor, "T B"], indices: Int[Tensor, "T K"]
) -> Float[Tensor, "T K"]:
    """Scores of some experts."""
    columns = second.shape[1]
    return first.gather(1, indices // columns) + second.gather(1, indices % columns)


def product_logsumexp(
    first: Float[Tensor, "T A"], second: Float[Tensor, "T B"]
) -> Float[Tensor, "T 1"]:
    """Logarithm of the sum of exp(score) over all experts: the sum over a grid is a product."""
    return first.logsumexp(1, keepdim=True) + second.logsumexp(1, keepdim=True)


@torch.no_grad()
def product_top_k(
    first: Float[Tensor, "T A"], second: Float[Tensor, "T B"], top_k: int
) -> Int[Tensor, "T K"]:
    """Find ``best_experts(product_scores(first, second), top_k)`` among K x K candidates.

    Equal scores are resolved as there. The best experts of a grid are in its K best rows and K
    best columns, with one exception: rounded, a score of a worse row may equal that of the last
    expert chosen. Tokens for which it may are ranked by all their scores: the host waits for the
    device.
    """
    first, second = _comparable(first), _comparable(second)
    rows, best_row, next_row = _leading(first, top_k)
    columns, best_column, next_column = _leading(second, top_k)
    candidates = _comparable(product_scores(first.gather(1, rows), second.gather(1, columns)))
    places = dispatch.best_experts(candidates, top_k)
    width = columns.shape[1]
    chosen_rows, chosen_columns = rows.gather(1, places // width), columns.gather(1, places % width)
    indices = chosen_rows * second.shape[1] + chosen_columns
    left_out = torch.cat([next_row + best_column, best_row + next_column], dim=1)
    last = candidates.gather(1, places[:, -1:])
    maybe_tied = (_comparable(left_out) >= last).any(dim=1).nonzero().flatten()
    if len(maybe_tied):
        scores = product_scores(first[maybe_tied], second[maybe_tied])
        indices[maybe_tied] = dispatch.best_experts(scores, top_k)
    return indices


def _leading(scores: Float[Tensor, "T A"], top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find indices [T, K] of the K best, ascending; the best score [T, 1]; the best left out.

    The last is [T, 1], or [T, 0] where nothing is left out.
    """
    order = dispatch.best_experts(scores, min(top_k + 1, scores.shape[1]))
    values = scores.gather(1, order)
    return order[:, :top_k].sort(dim=1).values, values[:, :1], values[:, top_k:]


def _comparable(scores: Tensor) -> Tensor:
    """Scores with NaN replaced by -inf, as in the choice of experts."""
    return scores.masked_fill(scores.isnan(), -math.inf)
