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
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from l2r.analysis.certificates.attack import decision_gap
from l2r.analysis.certificates.local_bounds import EXACT, LocalBounds
from l2r.analysis.certificates.rank2_radii import plane_radii
from l2r.analysis.certificates.routing_map import AnchorMap, LinearMap, RoutingMap, routing_map
from l2r.routers import Router
from l2r.routers.observe import evaluating, first_choice, more_inputs

PAIRS = 2**20  # pairs of a chosen expert and any, over all tokens of a chunk, held at once
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
    for part, logits, first, chosen in _decisions(form, router, x):
        top1.append(_radii(form, part, logits, first))
        topk.append(_radii(form, part, logits, chosen))
    return Certificate(
        _with_geometry(form, x, torch.cat(top1), 1) * SHRINK,
        _with_geometry(form, x, torch.cat(topk), chosen.shape[1]) * SHRINK,
    )


@torch.no_grad()
def certify_first(router: nn.Module, x: Float[Tensor, "T D"]) -> Float[Tensor, " T"]:
    """Radii of the first expert alone, without the geometry of rank 2: fast enough for a text.

    Never above ``certify``'s, and the same except for several anchors of rank 2. Raises
    ValueError for the same routers.
    """
    form = routing_map(router)
    parts = _decisions(form, router, x)
    radii = [_radii(form, part, logits, first) for part, logits, first, _ in parts]
    return torch.cat(radii) * SHRINK


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
    for part, logits, _, chosen in _decisions(form, router, x):
        reach = distance[done : done + len(part)].double() / SHRINK
        done += len(part)
        if chosen.shape[1] == form.num_experts or isinstance(form, LinearMap):
            held.append(_radii(form, part, logits, chosen) > reach)
            continue
        local = LocalBounds.of(form, part, chosen)
        bound = _least(local.lower_bound(_gaps(logits, chosen), reach), chosen)
        held.append((bound > 0) & (reach < local.max_radius))
    return torch.cat(held)


def _decisions(
    form: RoutingMap, router: nn.Module, x: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """By chunks of tokens: x, the form's logits, the first expert [T, 1] and the k [T, K].

    Raises ValueError where the form does not reproduce either choice.
    """
    if isinstance(router, Router):
        _check_rule(router)
    else:
        _check_alone(router)
    with evaluating(router):
        own_logits, weights, chosen = router(x)
    chosen = chosen.long()
    first = first_choice(weights, chosen)[:, None]
    rows = max(1, PAIRS // (form.num_experts * chosen.shape[1]))
    parts = (tensor.split(rows) for tensor in (x, own_logits, first, chosen))
    for part, own, one, experts in zip(*parts, strict=True):
        logits = form.logits(part)
        for kept in (one, experts):
            _check_form(router, logits, own, kept)
        yield part, logits, one, experts


def _check_alone(router: nn.Module) -> None:
    """Raise ValueError for a router whose block passes it more than the hidden states."""
    if needed := more_inputs(router):
        raise ValueError(
            f"{type(router).__name__} chooses by its logits and {', '.join(needed)} of its block; "
            "no certificate is known"
        )


def _check_rule(router: Router) -> None:
    """Raise ValueError where more than the logits decides, on these tokens or on others.

    A selection bias that is 0 for every expert decides nothing.
    """
    rule = router.selection
    held, what = rule.held_bias(router), ""
    if rule.kept_groups < rule.groups:
        what = "groups of experts"
    elif held is not None and held.any():
        what = "a selection bias"
    elif held is None and rule.block_bias:
        what = "a bias of its block"
    if what:
        raise ValueError(
            f"{type(router).__name__} chooses by its logits and {what}; no certificate is known"
        )


def _radii(form: RoutingMap, x: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
    if chosen.shape[1] == form.num_experts:
        return torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
    if isinstance(form, LinearMap):
        return linear_radii(form, logits, chosen)
    return anchor_radii(form, x, logits, chosen)


def _with_geometry(form: RoutingMap, x: Tensor, radii: Tensor, keep: int) -> Tensor:
    """The larger of both bounds; 0 stays 0, since those tokens have no proven decision."""
    if isinstance(form, LinearMap) or len(form.matrix) != 2 or keep == form.num_experts:
        return radii
    return torch.where(radii > 0, torch.maximum(radii, plane_radii(form, x, keep)), radii)


def linear_radii(
    form: LinearMap, logits: Float[Tensor, "T N"], chosen: Int[Tensor, "T K"]
) -> Float[Tensor, " T"]:
    """Exact distance to the nearest hyperplane between a chosen expert and another."""
    apart = torch.cdist(form.weight, form.weight, compute_mode=EXACT)[chosen]  # [T, K, N]
    gaps = _gaps(logits, chosen).clamp_min(0)
    # Equal rows never change order; their gap is constant.
    constant = torch.where(gaps > 0, torch.inf, 0.0)
    ratio = torch.where(apart > 0, gaps / apart.clamp_min(1e-300), constant)
    return _least(ratio, chosen)


def anchor_radii(
    form: AnchorMap,
    x: Float[Tensor, "T D"],
    logits: Float[Tensor, "T N"],
    chosen: Int[Tensor, "T K"],
) -> Float[Tensor, " T"]:
    """Largest radius at which every pair of a chosen expert and another keeps a lower bound > 0."""
    local = LocalBounds.of(form, x, chosen)
    gaps = _gaps(logits, chosen)
    first_order = gaps.clamp_min(0) / local.slopes.clamp_min(1e-300)
    high = torch.minimum(_least(first_order, chosen), local.max_radius)
    low = torch.zeros_like(high)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        safe = _least(local.lower_bound(gaps, middle), chosen) > 0
        low, high = torch.where(safe, middle, low), torch.where(safe, high, middle)
    return low


def _gaps(logits: Float[Tensor, "T N"], chosen: Int[Tensor, "T K"]) -> Float[Tensor, "T K N"]:
    """Logit of every chosen expert less that of every expert."""
    return logits.gather(1, chosen)[:, :, None] - logits[:, None, :]


def _least(values: Float[Tensor, "T K N"], chosen: Int[Tensor, "T K"]) -> Float[Tensor, " T"]:
    """Minimum over pairs of a chosen expert and another."""
    both = torch.zeros(len(values), values.shape[2], dtype=torch.bool, device=values.device)
    both.scatter_(1, chosen, True)
    return values.masked_fill(both[:, None, :], torch.inf).flatten(1).amin(dim=1)


def _check_form(router: nn.Module, form_logits: Tensor, logits: Tensor, chosen: Tensor) -> None:
    """The form must choose what the router chose, but for ties in the router's precision."""
    none = torch.zeros_like(form_logits, dtype=torch.bool)
    inside = none.scatter(1, chosen, True)
    own = none.scatter(1, form_logits.topk(chosen.shape[1]).indices, True)
    rounding = _TIE * torch.finfo(logits.dtype).eps * logits.abs().amax(dim=1)
    differs = (own != inside).any(dim=1) & (inside.sum(dim=1) < inside.shape[1])
    for kept in (own, inside):
        tied = decision_gap(logits, kept).abs() <= rounding
        if (differs & ~tied).any():
            raise ValueError(
                f"{type(router).__name__} does not choose by its logits alone "
                f"({int(differs.sum())} of {len(differs)} tokens differ); no certificate is known"
            )


def certified_share(radii: Float[Tensor, " T"], sigma: float, hidden: int) -> float:
    """Share of tokens whose radius covers sigma * sqrt(hidden), the usual norm of the noise."""
    return (radii >= sigma * hidden**0.5).double().mean().item()
