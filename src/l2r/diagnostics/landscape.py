"""Scores of one anchor over the routing plane, computed by l2r.functional (paper, Figure 8)."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from l2r.functional import cosine_scores, dot_scores, sips_scores

Score = Callable[..., Tensor]

FLAT: Mapping[str, Score] = {"Dot product": dot_scores, "SIPS": sips_scores}
SWEEP: Mapping[str, Score] = {
    "Dot product": dot_scores,
    "Cosine": cosine_scores,
    **{f"SIPS, beta = {b:g}": functools.partial(sips_scores, beta=b) for b in (0.0, 0.25, 1.0)},
}


def landscape(
    scores: Mapping[str, Score], anchor: tuple[float, float], *, reach: float, points: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Axis [G] from -reach to reach, and the score at (y, x) [G, G] for every rule."""
    axis = torch.linspace(-reach, reach, points)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1).view(-1, 2)
    key = torch.tensor(anchor).view(1, 1, 2)
    return axis, {
        name: score(grid, key)[:, 0, 0].view(points, points) for name, score in scores.items()
    }
