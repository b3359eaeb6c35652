r"""Certified routing: a radius per token inside which its experts provably stay the same.

For a router input x, every input y with |y - x| <= radius (Euclidean) has the same first expert,
or the same set of k experts: in exact arithmetic, and as the router computes it in its own dtype,
for y that the dtype of the inputs holds (arithmetic.py says what is known of its rounding).

Exact but for that rounding for routers with one anchor per expert; for several anchors a lower
bound that is tight to first order, and for rank 2 also one by geometry that is near the exact
radius; the larger of the two counts (derivations: docs/diagnostics.md). Computed in float64 and
shrunk by SHRINK. A token whose decision rounding could change where it is gets 0.

Shape letters: T tokens, D hidden size, N experts, K experts chosen per token, R rank.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from l2r.analysis.certificates.arithmetic import Arithmetic, dtypes_of, family_of
from l2r.analysis.certificates.linear_bounds import LinearBounds
from l2r.analysis.certificates.local_bounds import LocalBounds
from l2r.analysis.certificates.rank2_radii import plane_radii
from l2r.analysis.certificates.routing_map import AnchorMap, LinearMap, RoutingMap, routing_map
from l2r.errors import InputError
from l2r.functional.selection import first_choice
from l2r.routers import Router
from l2r.routers.observe import evaluating, more_inputs
from l2r.routers.selection_rule import Selection

PAIRS = 2**20  # pairs of a chosen expert and any, over all tokens of a chunk, held at once
SHRINK = 1 - 1e-6
_RANK_LOGITS = ("cohere2_moe",)  # families that choose by logits and weigh by a sigmoid
_STEPS = 40  # halvings of the bisection: a relative width of 1e-12


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Certified radii [T] in the units of the router input, float64; infinity if K = N."""

    top1: Float[Tensor, " T"]
    topk: Float[Tensor, " T"]


@torch.no_grad()
def certify(router: nn.Module, x: Float[Tensor, "T D"]) -> Certificate:
    """Certified radii of every token, given in the dtype in which the router gets them.

    The router is taken in evaluation mode. Raises ValueError for a router without a known form,
    whose logits or decisions the form does not reproduce, or that chooses by more than its logits
    (selection biases, expert groups).
    """
    form, parts = _decisions(router, x)
    top1: list[Tensor] = []
    topk: list[Tensor] = []
    for part in parts:
        top1.append(_radii(form, part, part.first))
        topk.append(_radii(form, part, part.chosen))
    return Certificate(
        _with_geometry(form, x, torch.cat(top1), 1) * SHRINK,
        _with_geometry(form, x, torch.cat(topk), part.chosen.shape[1]) * SHRINK,
    )


@torch.no_grad()
def certify_first(router: nn.Module, x: Float[Tensor, "T D"]) -> Float[Tensor, " T"]:
    """Radii of the first expert alone, without the geometry of rank 2: fast enough for a text.

    Never above ``certify``'s, and the same except for several anchors of rank 2. Raises
    ValueError for the same routers.
    """
    form, parts = _decisions(router, x)
    return torch.cat([_radii(form, part, part.first) for part in parts]) * SHRINK


@torch.no_grad()
def holds_within(
    router: nn.Module, x: Float[Tensor, "T D"], distance: Float[Tensor, " T"]
) -> Bool[Tensor, " T"]:
    """Tell whether no change of an input up to ``distance`` changes its set of k experts.

    True where the certified radius, without the geometry of rank 2, exceeds the distance; one
    evaluation of the bound instead of the search for the radius. Raises ValueError for the same
    routers.
    """
    form, parts = _decisions(router, x)
    held, done = [], 0
    for part in parts:
        reach = distance[done : done + len(part.x)].double() / SHRINK
        done += len(part.x)
        if part.chosen.shape[1] == form.num_experts:
            held.append(torch.isfinite(reach))
            continue
        bounds = _bounds(form, part, part.chosen)
        bound = _least(bounds.lower_bound(_gaps(part.logits, part.chosen), reach), part.chosen)
        held.append((bound > 0) & (reach < bounds.max_radius))
    return torch.cat(held)


class _Part(NamedTuple):
    """Some of the tokens: inputs, the form's logits, the first expert [T, 1] and the k [T, K]."""

    x: Tensor
    logits: Tensor
    first: Tensor
    chosen: Tensor


def _decisions(router: nn.Module, x: Tensor) -> tuple[RoutingMap, Iterator[_Part]]:
    """Derive the form of a router, its arithmetic, and its decisions by chunks of tokens.

    Raises ValueError where the form does not reproduce its logits or either choice.
    """
    _check_rule(router)
    form = routing_map(router)
    with evaluating(router):
        own, weights, chosen = router(x)
    form = dataclasses.replace(form, arithmetic=_arithmetic(router, form, x, own))
    chosen = chosen.long()
    first = first_choice(weights, chosen)[:, None]
    return form, _parts(router, form, x, first, chosen)


def _parts(
    router: nn.Module, form: RoutingMap, x: Tensor, first: Tensor, chosen: Tensor
) -> Iterator[_Part]:
    rows = max(1, PAIRS // (form.num_experts * chosen.shape[1]))
    parts = (torch.split(t, rows) for t in (x, first, chosen))
    for tokens, one, experts in zip(*parts, strict=True):
        part = _Part(tokens, form.logits(tokens), one, experts)
        for kept in (one, experts):
            _check_choice(router, form, part, kept)
        yield part


def _check_rule(router: nn.Module) -> None:
    """Raise ValueError where more than the logits decides, on these tokens or on others."""
    what, family = "", family_of(router)
    if isinstance(router, Router) or family is not None:
        rule = router.selection if isinstance(router, Router) else family.selection(router)
        if rule.by_token:
            raise InputError(
                f"{type(router).__name__} chooses by the ids of tokens; no certificate is known"
            )
        if needed := [] if rule.block_bias else more_inputs(router):
            what = f"{', '.join(needed)} of its block"
        elif type(rule).__call__ is not Selection.__call__:
            what = f"the rule of {type(rule).__name__}"
        elif rule.kept_groups < rule.groups:
            what = "groups of experts"
        elif rule.bias is not None:  # of zeros, too: scores are ranked then, which round to ties
            what = "a selection bias"
        elif rule.block_bias:
            what = "a bias of its block"
        elif family is not None and rule.gate != "softmax" and rule.family not in _RANK_LOGITS:
            what = f"{rule.gate} scores, which round to ties"
    else:
        needed = more_inputs(router)
        what = f"{', '.join(needed)} of its block" if needed else ""
    if what:
        raise InputError(
            f"{type(router).__name__} chooses by its logits and {what}; no certificate is known"
        )


def _arithmetic(router: nn.Module, form: RoutingMap, x: Tensor, own: Tensor) -> Arithmetic:
    """Find a router's arithmetic. Raises ValueError if the form does not give the logits ``own``.

    Routers of ours compute in the dtype of their logits, which a form gives but for a factor.
    """
    if isinstance(form, AnchorMap) or isinstance(router, Router):
        if own.dtype.itemsize < 4:
            raise InputError(
                f"{type(router).__name__} computes in {own.dtype}, which rounds its queries; no "
                "certificate is known below float32"
            )
        if own.dtype is torch.float32:
            _check_products(x)
        return Arithmetic.of(own.dtype, ranks_logits=True)
    logits = form.logits(x)
    for dtype in dtypes_of(router, own):
        how = Arithmetic.of(dtype, ranks_logits=False)
        rounding = dataclasses.replace(form, arithmetic=how).logit_rounding(x, logits)
        overflows = logits.abs() + rounding > how.largest
        if (((logits - own.double()).abs() <= rounding) | overflows).all():
            return how
    raise InputError(
        f"{type(router).__name__} has other logits than its weight gives; no certificate is known"
    )


def _check_products(x: Tensor) -> None:
    """Raise ValueError where torch may round the factors of products in float32."""
    backend = torch.backends.cuda if x.is_cuda else torch.backends.mkldnn
    precision = backend.matmul.fp32_precision
    if precision in ("tf32", "bf16"):
        raise InputError(
            f"torch may multiply float32 in {precision} here; no certificate is known. "
            "torch.set_float32_matmul_precision('highest') turns that off"
        )


def _check_choice(router: nn.Module, form: RoutingMap, part: _Part, chosen: Tensor) -> None:
    """Check that the form chooses what the router chose, but for what rounding could change."""
    none = torch.zeros_like(part.logits, dtype=torch.bool)
    inside = none.scatter(1, chosen, True)
    own = none.scatter(1, part.logits.topk(chosen.shape[1]).indices, True)
    differs = (own != inside).any(dim=1)
    if not differs.any():
        return
    rows, chosen = _Part(*(field[differs] for field in part)), chosen[differs]
    gaps, bounds = _gaps(rows.logits, chosen), _bounds(form, rows, chosen)
    rounding = gaps - bounds.lower_bound(gaps, gaps.new_zeros(len(gaps)))
    tied = (_least(gaps + rounding, chosen) >= 0) | (bounds.max_radius <= 0)
    if not tied.all():
        raise InputError(
            f"{type(router).__name__} does not choose by its logits alone "
            f"({int(differs.sum())} of {len(differs)} tokens differ); no certificate is known"
        )


def _bounds(form: RoutingMap, part: _Part, chosen: Tensor) -> LinearBounds | LocalBounds:
    if isinstance(form, LinearMap):
        return LinearBounds.of(form, part.x, part.logits, chosen)
    return LocalBounds.of(form, part.x, chosen)


def _radii(form: RoutingMap, part: _Part, chosen: Int[Tensor, "T K"]) -> Float[Tensor, " T"]:
    """Largest radius at which every pair of a chosen expert and another keeps a lower bound > 0."""
    if chosen.shape[1] == form.num_experts:
        return torch.full((len(part.x),), torch.inf, dtype=torch.float64, device=part.x.device)
    bounds, gaps = _bounds(form, part, chosen), _gaps(part.logits, chosen)
    if isinstance(bounds, LinearBounds):
        return torch.minimum(_least(bounds.radii(gaps), chosen), bounds.max_radius)
    first_order = gaps.clamp_min(0) / bounds.slopes.clamp_min(1e-300)
    high = torch.minimum(_least(first_order, chosen), bounds.max_radius)
    low = torch.zeros_like(high)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        safe = _least(bounds.lower_bound(gaps, middle), chosen) > 0
        low, high = torch.where(safe, middle, low), torch.where(safe, high, middle)
    return low


def _with_geometry(form: RoutingMap, x: Tensor, radii: Tensor, keep: int) -> Tensor:
    """Take the larger of both bounds; 0 stays 0, since those tokens have no proven decision."""
    if isinstance(form, LinearMap) or len(form.matrix) != 2 or keep == form.num_experts:
        return radii
    proven = radii > 0
    radii[proven] = torch.maximum(radii[proven], plane_radii(form, x[proven], keep))
    return radii


def _gaps(logits: Float[Tensor, "T N"], chosen: Int[Tensor, "T K"]) -> Float[Tensor, "T K N"]:
    """Logit of every chosen expert less that of every expert."""
    return logits.gather(1, chosen)[:, :, None] - logits[:, None, :]


def _least(values: Float[Tensor, "T K N"], chosen: Int[Tensor, "T K"]) -> Float[Tensor, " T"]:
    """Minimum over pairs of a chosen expert and another."""
    both = torch.zeros(len(values), values.shape[2], dtype=torch.bool, device=values.device)
    both.scatter_(1, chosen, True)
    return values.masked_fill(both[:, None, :], torch.inf).flatten(1).amin(dim=1)


def certified_share(radii: Float[Tensor, " T"], sigma: float, hidden: int) -> float:
    """Share of tokens whose radius covers sigma * sqrt(hidden), the usual norm of the noise."""
    return (radii >= sigma * hidden**0.5).double().mean().item()
