"""Initial anchors that are spread evenly over directions instead of drawn."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from l2r.functional import unit

_STEPS = 60  # of repulsion
_OWN = 4.0  # added to the strength 1 of repulsion between two anchors of one expert


def even_anchors(experts: int, heads: int, rank: int) -> Float[Tensor, "N H R"]:
    """Unit anchors far from each other, those of one expert above all; drawn from torch's
    random state.

    In two dimensions all N H angles are equally far apart after one random turn, and so are the H
    of an expert. In more, drawn anchors repel each other for a few steps. In one there are only
    two directions, which take turns.
    """
    if rank == 1:
        turns = torch.arange(experts).unsqueeze(1) + torch.arange(heads)
        return 1.0 - 2.0 * (turns % 2).unsqueeze(-1)
    if rank == 2:
        place = torch.arange(experts, dtype=torch.float64).unsqueeze(1) / (experts * heads)
        turn = place + torch.arange(heads) / heads + torch.rand((), dtype=torch.float64)
        return torch.stack([(2 * math.pi * turn).cos(), (2 * math.pi * turn).sin()], -1).float()
    points = unit(torch.randn(experts * heads, rank))
    expert = torch.arange(experts).repeat_interleave(heads)
    strength = 1 + _OWN * (expert.unsqueeze(1) == expert)
    for step in range(_STEPS):
        # force strength / distance^2 along each difference; the largest step shrinks to nothing
        pull = strength / torch.cdist(points, points).fill_diagonal_(torch.inf).clamp_min(0.01) ** 3
        force = pull.sum(1, keepdim=True) * points - pull @ points
        force -= (force * points).sum(1, keepdim=True) * points
        size = force.norm(dim=1).max().clamp_min(1e-12)
        points = unit(points + 0.2 * (1 - step / _STEPS) * force / size)
    return points.view(experts, heads, rank)
