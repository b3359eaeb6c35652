r"""Certified routing: a radius per token inside which its experts provably stay the same.

For a router input x, every x + delta with |delta| <= radius (Euclidean) has the same first
expert, or the same set of k experts. Exact for routers with one anchor per expert; for several
anchors a lower bound that is tight to first order, and for rank 2 also one by geometry that is
near the exact radius; the larger of the two counts (derivations: docs/diagnostics.md).

The statement is about the router in exact arithmetic. It is computed in float64 and shrunk by
SHRINK; a token whose decision in the router's own precision differs from float64 gets 0.

Shape letters: T tokens, D hidden size, N experts, K experts chosen per token, R rank.
"""

import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from l2r.analysis.certificates.attack import decision_gap
from l2r.analysis.certificates.local_bounds import EXACT, LocalBounds
from l2r.analysis.certificates.rank2_cells import plane_radii
from l2r.analysis.certificates.routing_map import AnchorMap, LinearMap, RoutingMap, routing_map
from l2r.routers import Router
from l2r.routers.observe import evaluating, first_choice

PAIRS = 2**20  # pairs of experts, over all tokens of a chunk, that are held at once
SHRINK = 1 - 1e-6
_TIE = 256  # roundings of the largest logit below which two precisions may disagree
_STEPS = 40  # halvings of the bisection: a relative width of 1e-12


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Certified radii [T] in the units of the router input, float64; infinity if K = N."""

    top1: Float[Tensor, " T"]
    topk: Float[Tensor, " T"]


@torch.no_grad()
def certify(router: nn.Module, x: Float[Tensor, "T D"]) -> Certificate:
    """Certified radii of every token; the router is taken in evaluation mode.

    Raises ValueError for a router without a known form, or whose decisions the form does not
    reproduce (selection biases, expert groups).
    """
    form = routing_map(router)
    top1: list[Tensor] = []
    topk: list[Tensor] = []
    for part, logits, one, inside in _decisions(form, router, x):
        top1.append(_radii(form, part, logits, one))
        topk.append(_radii(form, part, logits, inside))
    keep = int(inside[0].sum())
    return Certificate(
        _with_geometry(form, x, torch.cat(top1), 1) * SHRINK,
        _with_geometry(form, x, torch.cat(topk), keep) * SHRINK,
    )


@torch.no_grad()
def certify_first(router: nn.Module, x: Float[Tensor, "T D"]) -> Float[Tensor, " T"]:
    """Radii of the first expert alone, without the geometry of rank 2: fast enough for a text.

    Never above ``certify``'s, and the same except for several anchors of rank 2. Raises
    ValueError for the same routers.
    """
    form = routing_map(router)
    parts = _decisions(form, router, x)
    return torch.cat([_radii(form, part, logits, one) for part, logits, one, _ in parts]) * SHRINK


@torch.no_grad()
def holds_within(
    router: nn.Module, x: Float[Tensor, "T D"], distance: Float[Tensor, " T"]
) -> Bool[Tensor, " T"]:
    """Whether no change of a token's input up to ``distance`` changes its set of k experts.

    True where the certified radius, without the geometry of rank 2, exceeds the distance; one
    evaluation of the bound instead of the search for the radius. Raises ValueError for the same
    routers.
    """
    form = routing_map(router)
    held, done = [], 0
    for part, logits, _, inside in _decisions(form, router, x):
        reach = distance[done : done + len(part)].double() / SHRINK
        done += len(part)
        if inside.all() or isinstance(form, LinearMap):
            held.append(_radii(form, part, logits, inside) > reach)
            continue
        local = LocalBounds.of(form, part)
        gaps = logits[:, :, None] - logits[:, None, :]
        bound = _least(local.lower_bound(gaps, reach), inside)
        held.append((bound > 0) & (reach < local.max_radius))
    return torch.cat(held)


def _decisions(
    form: RoutingMap, router: nn.Module, x: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """By chunks of tokens: x, the form's logits, and masks [T, N] of the first and the k experts.

    Raises ValueError where the form does not reproduce either of them.
    """
    held = router.selection.held_bias(router) if isinstance(router, Router) else None
    if held is not None and held.any():
        raise ValueError(
            f"{type(router).__name__} chooses by its logits and a selection bias; "
            "no certificate is known"
        )
    rows = max(1, PAIRS // form.num_experts**2)
    with evaluating(router):
        for part in torch.split(x, rows):
            logits = form.logits(part)
            own_logits, weights, chosen = router(part)
            inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, chosen, True)
            first = first_choice(weights, chosen)[:, None]
            one = torch.zeros_like(inside).scatter_(1, first, True)
            for kept in (one, inside):
                _check_form(router, logits, own_logits, kept)
            yield part, logits, one, inside


def _radii(form: RoutingMap, x: Tensor, logits: Tensor, inside: Tensor) -> Tensor:
    if inside.all():  # all experts are chosen
        return torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
    if isinstance(form, LinearMap):
        return linear_radii(form, logits, inside)
    return anchor_radii(form, x, logits, inside)


def _with_geometry(form: RoutingMap, x: Tensor, radii: Tensor, keep: int) -> Tensor:
    """The larger of both bounds; 0 stays 0, since those tokens have no proven decision."""
    if isinstance(form, LinearMap) or len(form.matrix) != 2 or keep == form.num_experts:
        return radii
    return torch.where(radii > 0, torch.maximum(radii, plane_radii(form, x, keep)), radii)


def linear_radii(
    form: LinearMap,
    logits: Float[Tensor, "T N"],
    inside: Tensor,
) -> Float[Tensor, " T"]:
    """Exact distance to the nearest hyperplane between an expert inside and one outside."""
    apart = torch.cdist(form.weight, form.weight, compute_mode=EXACT)
    gaps = (logits[:, :, None] - logits[:, None, :]).clamp_min(0)
    # Equal rows never change order; their gap is constant.
    constant = torch.where(gaps > 0, torch.inf, 0.0)
    ratio = torch.where(apart > 0, gaps / apart.clamp_min(1e-300), constant)
    return _least(ratio, inside)


def anchor_radii(
    form: AnchorMap,
    x: Float[Tensor, "T D"],
    logits: Float[Tensor, "T N"],
    inside: Tensor,
) -> Float[Tensor, " T"]:
    """Largest radius at which every pair inside / outside keeps a positive lower bound."""
    local = LocalBounds.of(form, x)
    gaps = logits[:, :, None] - logits[:, None, :]
    first_order = gaps.clamp_min(0) / local.slopes.clamp_min(1e-300)
    high = torch.minimum(_least(first_order, inside), local.max_radius)
    low = torch.zeros_like(high)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        safe = _least(local.lower_bound(gaps, middle), inside) > 0
        low, high = torch.where(safe, middle, low), torch.where(safe, high, middle)
    return low


def _least(values: Float[Tensor, "T N N"], inside: Tensor) -> Float[Tensor, " T"]:
    """Minimum over pairs of an expert inside and an expert outside; infinity without pairs."""
    pairs = inside[:, :, None] & ~inside[:, None, :]
    return torch.where(pairs, values, torch.inf).flatten(1).amin(dim=1)


def _check_form(router: nn.Module, form_logits: Tensor, logits: Tensor, inside: Tensor) -> None:
    """The form must choose what the router chose, but for ties in the router's precision."""
    keep = int(inside[0].sum())
    own = torch.zeros_like(inside).scatter_(1, form_logits.topk(keep).indices, True)
    rounding = _TIE * torch.finfo(logits.dtype).eps * logits.abs().amax(dim=1)
    differs = (own != inside).any(dim=1) & (inside.sum(dim=1) < inside.shape[1])
    for chosen in (own, inside):
        tied = decision_gap(logits, chosen).abs() <= rounding
        if (differs & ~tied).any():
            raise ValueError(
                f"{type(router).__name__} does not choose by its logits alone "
                f"({int(differs.sum())} of {len(differs)} tokens differ); no certificate is known"
            )


def certified_share(radii: Float[Tensor, " T"], sigma: float, hidden: int) -> float:
    """Share of tokens whose radius covers sigma * sqrt(hidden), the usual norm of the noise."""
    return (radii >= sigma * hidden**0.5).double().mean().item()
