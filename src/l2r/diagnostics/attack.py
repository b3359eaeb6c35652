"""Adversarial search on the router input: smallest change found, and tries at a certificate.

It uses autograd through the router itself, in float64, and nothing of the certificate's maths.

Shape letters: T tokens, D hidden size, N experts, K experts chosen per token.
"""

import copy
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from l2r.diagnostics.robustness import first_choice, route

Chosen = Bool[Tensor, "T N"]


def decisions(router: nn.Module, x: Float[Tensor, "T D"], *, top1: bool) -> Chosen:
    """Mask of the experts whose set must not change: the first one, or the k chosen."""
    with torch.no_grad():
        logits, weights, indices = route(router, x)
    kept = first_choice(weights, indices)[:, None] if top1 else indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, kept, True)


def decision_gap(logits: Float[Tensor, "T N"], inside: Chosen) -> Float[Tensor, " T"]:
    """Smallest logit inside minus largest outside; the decision holds while it is positive."""
    lowest = torch.where(inside, logits, torch.inf).amin(dim=1)
    return lowest - torch.where(inside, -torch.inf, logits).amax(dim=1)


def find_flip(
    router: nn.Module,
    x: Float[Tensor, "T D"],
    *,
    top1: bool = True,
    steps: int = 20,
    restarts: int = 8,
) -> Float[Tensor, " T"]:
    """Norm of the smallest change found that flips a decision; infinity where none was found.

    For each of the ``restarts`` pairs of an expert inside and one outside that are closest to a
    tie: steps to the nearest point of the linearised tie (DeepFool, seen from the token), then
    bisection back towards the token. An upper bound of the true radius.
    """
    wide = exact(router)
    start = x.double()
    inside = decisions(wide, start, top1=top1)
    best = torch.full((len(x),), torch.inf, dtype=torch.float64, device=x.device)
    targets = _nearest_pairs(wide, start, inside, restarts)
    for kept, other in targets:
        delta = torch.zeros_like(start)
        for _ in range(steps):
            gap, slope = _pair_and_slope(wide, start + delta, kept, other)
            scale = slope.square().sum(dim=1, keepdim=True).clamp_min(1e-300)
            # Nearest point of the linearised boundary, seen from the token itself.
            along = (gap[:, None] - (slope * delta).sum(dim=1, keepdim=True)) / scale
            delta = -along * slope * (1 + 1e-6)
        delta = _shrink(wide, start, delta, inside)
        with torch.no_grad():
            gap = decision_gap(route(wide, start + delta)[0], inside)
        found = torch.linalg.vector_norm(delta, dim=1)
        best = torch.where((gap <= 0) & (found < best), found, best)
    return best


def count_violations(
    router: nn.Module,
    x: Float[Tensor, "T D"],
    radii: Float[Tensor, " T"],
    *,
    top1: bool = True,
    tries: int = 100,
    steps: int = 5,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> int:
    """Tries that flipped a decision inside its certified ball; 0 for a sound certificate.

    Each try starts on the sphere of the token's radius at random, follows the gradient of the
    gap with the closest other expert for ``steps`` projected steps, and looks at every point
    on the way. ``report`` is called with the number of tries done after each round.
    """
    wide = exact(router)
    start, radius = x.double(), radii.double()[:, None]
    usable = torch.isfinite(radii)
    start, radius = start[usable], radius[usable]
    inside = decisions(wide, start, top1=top1)
    generator = torch.Generator().manual_seed(seed)
    violations = 0
    for done in range(tries):
        noise = torch.randn(start.shape, generator=generator, dtype=torch.float64).to(x.device)
        delta = radius * nn.functional.normalize(noise, dim=1)
        broken = torch.zeros(len(start), dtype=torch.bool, device=x.device)
        for _ in range(steps):
            gap, slope = _gap_and_slope(wide, start + delta, inside)
            broken |= gap < 0
            push = delta - 2 * radius * nn.functional.normalize(slope, dim=1)
            delta = radius * nn.functional.normalize(push, dim=1)
        gap, _ = _gap_and_slope(wide, start + delta, inside)
        broken |= gap < 0
        violations += int(broken.sum())
        report((done + 1) * len(start))
    return violations


def exact(router: nn.Module) -> nn.Module:
    """A float64 copy of a router in evaluation mode."""
    wide = copy.deepcopy(router).double().eval()
    return wide.requires_grad_(False)


def _nearest_pairs(
    router: nn.Module, x: Tensor, inside: Tensor, count: int
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of an expert inside and one outside, by the first-order distance to a tie."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        logits = route(router, point)[0]
        slopes = [
            torch.autograd.grad(logits[:, expert].sum(), point, retain_graph=True)[0]
            for expert in range(logits.shape[1])
        ]
    rows = torch.stack(slopes, dim=1)
    ratio = (logits[:, :, None] - logits[:, None, :]).detach() / torch.cdist(rows, rows)
    pairs = inside[:, :, None] & ~inside[:, None, :]
    ranked = torch.where(pairs, ratio.nan_to_num(torch.inf), torch.inf).flatten(1)
    ranked = ranked.topk(min(count, ranked.shape[1]), largest=False).indices
    experts = logits.shape[1]
    return [(pair // experts, pair % experts) for pair in ranked.unbind(dim=1)]


def _pair_and_slope(
    router: nn.Module, x: Tensor, kept: Tensor, other: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        logits = route(router, point)[0]
        gap = (logits.gather(1, kept[:, None]) - logits.gather(1, other[:, None]))[:, 0]
        (slope,) = torch.autograd.grad(gap.sum(), point)
    return gap.detach(), slope


def _gap_and_slope(router: nn.Module, x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        logits, _, _ = route(router, point)
        gap = decision_gap(logits, inside)
        (slope,) = torch.autograd.grad(gap.sum(), point)
    return gap.detach(), slope


def _shrink(router: nn.Module, start: Tensor, delta: Tensor, inside: Tensor) -> Tensor:
    """Bisection along the ray from the token to a flipped point."""
    low = torch.zeros(len(start), 1, dtype=delta.dtype, device=delta.device)
    high = torch.ones_like(low)
    for _ in range(30):
        middle = (low + high) / 2
        logits, _, _ = route(router, start + middle * delta)
        flipped = (decision_gap(logits, inside) <= 0)[:, None]
        low, high = torch.where(flipped, low, middle), torch.where(flipped, middle, high)
    return high * delta
