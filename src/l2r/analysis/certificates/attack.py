"""Adversarial search on the router input: smallest change found, and tries at a certificate.

It uses autograd through the router itself, in float64, and nothing of the certificate's maths.

Shape letters: T tokens, D hidden size, N experts, K experts chosen per token.
"""

import copy

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from l2r.routers import Router
from l2r.routers.observe import first_choice

Chosen = Bool[Tensor, "T N"]


def decisions(router: nn.Module, x: Float[Tensor, "T D"], *, top1: bool) -> Chosen:
    """Mask of the experts whose set must not change: the first one, or the k chosen."""
    with torch.no_grad():
        logits, weights, indices = router(x)
    experts = first_choice(weights, indices)[:, None] if top1 else indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, True)


def decision_gap(logits: Float[Tensor, "T N"], inside: Chosen) -> Float[Tensor, " T"]:
    """Smallest logit inside minus largest outside; the decision holds while it is positive."""
    lowest = torch.where(inside, logits, torch.inf).amin(dim=1)
    return lowest - torch.where(inside, -torch.inf, logits).amax(dim=1)


def find_flip(
    router: nn.Module,
    x: Float[Tensor, "T D"],
    *,
    top1: bool = True,
    starts: int = 6,
    steps: int = 15,
) -> Float[Tensor, " T"]:
    """Norm of the smallest change found that flips a decision; infinity where none was found.

    Starts: for the pairs of an expert inside and one outside that are closest to a tie, steps
    to the nearest point of the linearised tie (DeepFool, seen from the token); the way to other
    tokens that are routed differently; and random points spanned by the logits' gradients. The
    best of each kind is walked along the boundary towards the token. An upper bound of the true
    radius.
    """
    wide = exact(router)
    start = x.double()
    inside = decisions(wide, start, top1=top1)
    generator = torch.Generator().manual_seed(0)
    logits, slopes = _logit_slopes(wide, start)
    ties = _towards_ties(wide, start, *_nearest_pairs(logits, slopes, inside, starts), steps)
    best = _nearest_flip(wide, start, inside, ties, steps)
    orders = [torch.randperm(len(x), generator=generator).to(x.device) for _ in range(starts)]
    others = torch.stack([1.001 * (start[order] - start) for order in orders])
    best = torch.minimum(best, _nearest_flip(wide, start, inside, others, steps))
    reach = torch.where(torch.isfinite(best), best, torch.linalg.vector_norm(start, dim=1))
    spanned = _spanned(slopes, reach, 5 * starts, generator)
    return torch.minimum(best, _nearest_flip(wide, start, inside, spanned, steps))


def count_violations(
    router: nn.Module,
    x: Float[Tensor, "T D"],
    radii: Float[Tensor, " T"],
    *,
    top1: bool = True,
    tries: int = 100,
    steps: int = 5,
    seed: int = 0,
) -> int:
    """Tries that flipped a decision inside its certified ball; 0 for a sound certificate.

    Each try starts on the sphere of the token's radius at random, follows the gradient of the
    gap with the closest other expert for ``steps`` projected steps, and looks at every point
    on the way.
    """
    wide = exact(router)
    start, radius = x.double(), radii.double()[:, None]
    usable = torch.isfinite(radii)
    start, radius = start[usable], radius[usable]
    inside = decisions(wide, start, top1=top1)
    generator = torch.Generator().manual_seed(seed)
    violations = 0
    for _ in range(tries):
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
    return violations


def exact(router: nn.Module) -> nn.Module:
    """A float64 copy of a router in evaluation mode."""
    wide = copy.deepcopy(router).double().eval()
    return wide.requires_grad_(False)


def _logits(router: nn.Module, x: Tensor) -> Tensor:
    """Logits [T, N] alone: the selection behind them takes a fifth of a search's time."""
    return router.logits(x) if isinstance(router, Router) else router(x)[0]


def _nearest_flip(
    router: nn.Module, start: Tensor, inside: Tensor, changes: Tensor, steps: int
) -> Tensor:
    """Norm [T] of the smallest flip on the way to any of ``changes`` [C, T, D], walked closer."""
    count = len(changes)
    shrunk, size = _shrink(
        router, start.repeat(count, 1), changes.flatten(0, 1), inside.repeat(count, 1)
    )
    least = size.view(count, -1).min(dim=0)
    tokens = torch.arange(len(start), device=start.device)
    delta = shrunk.view_as(changes)[least.indices, tokens]
    return _walk(router, start, delta, least.values, inside, steps)


def _logit_slopes(router: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, N] and their gradients [T, N, D]."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        logits = _logits(router, point)
        slopes = [
            torch.autograd.grad(logits[:, expert].sum(), point, retain_graph=True)[0]
            for expert in range(logits.shape[1])
        ]
    return logits.detach(), torch.stack(slopes, dim=1)


def _nearest_pairs(
    logits: Tensor, slopes: Tensor, inside: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Experts inside and outside [C, T] of the pairs nearest to a tie, to first order."""
    ratio = (logits[:, :, None] - logits[:, None, :]) / torch.cdist(slopes, slopes)
    pairs = inside[:, :, None] & ~inside[:, None, :]
    ranked = torch.where(pairs, ratio.nan_to_num(torch.inf), torch.inf).flatten(1)
    ranked = ranked.topk(min(count, ranked.shape[1]), largest=False).indices.T
    return ranked // logits.shape[1], ranked % logits.shape[1]


def _spanned(slopes: Tensor, reach: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random changes [C, T, D] in the span of the logits' gradients, of norms up to ``reach``."""
    shape = (count, *slopes.shape[:2])
    mix = torch.randn(shape, generator=generator, dtype=slopes.dtype).to(slopes.device)
    direction = nn.functional.normalize(torch.einsum("ctn,tnd->ctd", mix, slopes), dim=-1)
    share = torch.linspace(0.2, 1, count, dtype=reach.dtype, device=reach.device)
    return share[:, None, None] * reach[:, None] * direction


def _gap_and_slope(router: nn.Module, x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Gap of the decision and its gradient in the input."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        gap = decision_gap(_logits(router, point), inside)
        (slope,) = torch.autograd.grad(gap.sum(), point)
    return gap.detach(), slope


def _towards_ties(
    router: nn.Module, start: Tensor, kept: Tensor, other: Tensor, steps: int
) -> Tensor:
    """Changes [C, T, D] of the input near the closest points where pairs of experts tie."""
    count = len(kept)
    wide, kept, other = start.repeat(count, 1), kept.reshape(-1, 1), other.reshape(-1, 1)
    delta = torch.zeros_like(wide)
    for step in range(steps):
        with torch.enable_grad():
            point = (wide + delta).requires_grad_()
            logits = _logits(router, point)
            gap = logits.gather(1, kept) - logits.gather(1, other)
            (slope,) = torch.autograd.grad(gap.sum(), point)
        scale = slope.square().sum(dim=1, keepdim=True).clamp_min(1e-300)
        along = (gap.detach() - (slope * delta).sum(dim=1, keepdim=True)) / scale
        target = -along * slope * (1 + 1e-6)
        delta = target if step < steps // 2 else (delta + target) / 2  # damped where it swings
    return delta.view(count, *start.shape)


def _walk(
    router: nn.Module, start: Tensor, delta: Tensor, size: Tensor, inside: Tensor, steps: int
) -> Tensor:
    """Slide a flipped point along the boundary towards the token; returns its norm.

    Each step goes part of the way to the point of the boundary's tangent plane that is nearest
    to the token, a longer part after a success and a shorter one after a failure.
    """
    share = torch.full_like(size, 0.5)
    for _ in range(steps):
        _, slope = _gap_and_slope(router, start + delta, inside)
        scale = slope.square().sum(dim=1, keepdim=True).clamp_min(1e-300)
        nearest = (slope * delta).sum(dim=1, keepdim=True) / scale * slope
        candidate = 1.01 * (delta + share[:, None] * (nearest - delta))
        shrunk, shrunk_size = _shrink(router, start, candidate, inside, halvings=12)
        better = shrunk_size < size
        delta = torch.where(better[:, None], shrunk, delta)
        size = torch.where(better, shrunk_size, size)
        share = torch.where(better, (share * 1.5).clamp_max(1), share / 2)
    return torch.minimum(size, _shrink(router, start, delta, inside)[1])


@torch.no_grad()
def _shrink(
    router: nn.Module, start: Tensor, delta: Tensor, inside: Tensor, halvings: int = 30
) -> tuple[Tensor, Tensor]:
    """Shortest flipped point by bisection on the way to ``delta``, and its norm; infinity
    where ``delta`` itself does not flip."""
    low = torch.zeros(len(start), 1, dtype=delta.dtype, device=delta.device)
    high = torch.ones_like(low)
    flips = decision_gap(_logits(router, start + delta), inside) <= 0
    for _ in range(halvings):
        middle = (low + high) / 2
        logits = _logits(router, start + middle * delta)
        flipped = (decision_gap(logits, inside) <= 0)[:, None]
        low, high = torch.where(flipped, low, middle), torch.where(flipped, middle, high)
    shrunk = high * delta
    size = torch.linalg.vector_norm(shrunk, dim=1)
    return shrunk, torch.where(flips, size, torch.inf)
