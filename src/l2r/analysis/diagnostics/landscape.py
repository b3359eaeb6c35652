"""Scores of one anchor over the routing plane, computed by l2r.functional (paper, Figure 8), and
the anchors that the score explorer starts with.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from l2r.analysis.certificates.routing_map import radial_of
from l2r.errors import InputError
from l2r.functional import cosine_scores, dot_scores, sips_scores, unit
from l2r.functional.scoring import EPS
from l2r.routers.l2r import AnchorRouter
from l2r.routers.observe import find_routers

# What the explorer's sliders and scripts call them; scale and shift: BatchNorm of |q|.
_SIPS = {"gamma": 1.0, "beta": 1.0, "p": 4.0, "eps": EPS, "scale": 1.0, "shift": 0.0}

Score = Callable[..., Tensor]

FLAT_SCORES: Mapping[str, Score] = {"Dot product": dot_scores, "SIPS": sips_scores}
SWEPT_SCORES: Mapping[str, Score] = {
    "Dot product": dot_scores,
    "Cosine": cosine_scores,
    **{f"SIPS, beta = {b:g}": functools.partial(sips_scores, beta=b) for b in (0.0, 0.25, 1.0)},
}


def logit_landscape(
    scores: Mapping[str, Score], anchor: tuple[float, float], *, reach: float, points: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Axis [G] from -reach to reach, and the score at (y, x) [G, G] for every rule."""
    axis = torch.linspace(-reach, reach, points)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1).view(-1, 2)
    key = torch.tensor(anchor).view(1, 1, 2)
    return axis, {
        name: score(grid, key)[:, 0, 0].view(points, points) for name, score in scores.items()
    }


def drawn_anchors(seed: int, *, experts: int = 16, heads: int = 16) -> dict[str, Any]:
    """Draw unit anchors [N, H, 2] as a router draws its initial ones; with the paper's settings.

    spreads [N, H]: a normal number for each, by which the explorer can make lengths differ.
    """
    random = torch.Generator().manual_seed(seed)
    anchors = unit(torch.randn(experts, heads, 2, generator=random))
    return {
        "name": f"drawn, seed {seed}",
        "anchors": _plain(anchors),
        "spreads": _plain(torch.randn(experts, heads, generator=random)),
        "settings": {"scoring": "sips", "temperature": 1.0, **_SIPS},
    }


def anchors_of(model: nn.Module, layers: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Anchors [N, H, 2] and settings of the layers' routers, or of all that decide in a plane.

    Raises ValueError for a layer that is not there, and where no router has anchors of rank 2.
    """
    routers = list(find_routers(model).items())
    for layer in layers or ():
        if not 0 <= layer < len(routers):
            raise InputError(f"layers must be between 0 and {len(routers) - 1}; got {layer}")
    chosen = range(len(routers)) if layers is None else layers
    sets = []
    for number in chosen:
        name, router = routers[number]
        if isinstance(router, AnchorRouter) and router.anchors.shape[-1] == 2:
            sets.append(_set_of(f"layer {number}: {name}", router))
    if not sets:
        router = routers[chosen[0]][1]
        rank = router.anchors.shape[-1] if isinstance(router, AnchorRouter) else None
        has = f"anchors of rank {rank}" if rank else "no anchors"
        raise InputError(
            "the explorer draws routers with anchors of rank 2 (l2r_sips, l2r_cosine or l2r_dot "
            f"with rank=2); got {type(router).__name__} with {has}"
        )
    return sets


def _set_of(name: str, router: AnchorRouter) -> dict[str, Any]:
    config, learned = router.config, router.log_temperature
    settings = {key: getattr(config, key) for key in ("scoring", *_SIPS) if hasattr(config, key)}
    temperature = config.temperature if learned is None else learned.exp().item()
    radial = radial_of(router)  # phi's norm is scale |q| + shift
    seen = {"scale": getattr(radial, "scale", 1.0), "shift": getattr(radial, "shift", 0.0)}
    return {
        "name": name,
        "anchors": _plain(router.anchors),
        "settings": {**settings, **seen, "temperature": temperature},
    }


def _plain(values: Tensor) -> Any:
    """Nested lists, with the seven digits that fp32 has."""
    rounded = [float(f"{value:.7g}") for value in values.detach().float().flatten().tolist()]
    return torch.tensor(rounded, dtype=torch.float64).view(values.shape).tolist()
