"""Adversarial search on the router input: smallest change found, and tries at a certificate.

It uses autograd through the router itself, in float64, and nothing of the certificate's maths.

Shape letters: T tokens, D hidden size, N experts, K experts chosen per token.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from l2r.functional.selection import first_choice
from l2r.routers import Router

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
    best of each kind is walked along the boundary towards the token: no less than the true radius.
    """
    wide = exact(router)
    start = x.double()
    inside = decisions(wide, start, top1=top1)
    generator = torch.Generator().manual_seed(0)
    logits, slopes = _logit_slopes(wide, start)
    ties = _towards_ties(wide, start, *_nearest_pairs(logits, slopes, inside, starts), steps)
    orders = [torch.randperm(len(x), generator=generator).to(x.device) for _ in range(starts)]
    others = torch.stack([1.001 * (start[order] - start) for order in orders])
    best = _nearest_flip(wide, start, inside, [ties, others], steps)
    reach = torch.where(torch.isfinite(best), best, torch.linalg.vector_norm(start, dim=1))
    spanned = _spanned(slopes, reach, 5 * starts, generator)
    return torch.minimum(best, _nearest_flip(wide, start, inside, [spanned], steps))


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
    """Count the tries that flipped a decision inside its certified ball; 0 for a sound certificate.

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
    """Copy a router to float64, in evaluation mode."""
    wide = copy.deepcopy(router).double().eval()
    return wide.requires_grad_(False)


def _logits(router: nn.Module, x: Tensor) -> Tensor:
    """Logits [T, N] alone: the selection behind them takes a fifth of a search's time."""
    return router.logits(x) if isinstance(router, Router) else router(x)[0]


def _nearest_flip(
    router: nn.Module, start: Tensor, inside: Tensor, kinds: Sequence[Tensor], steps: int
) -> Tensor:
    """Norm [T] of the smallest flip found on the way to changes of one or more kinds.

    The best of each kind's changes [C, T, D] is walked closer.
    """
    nearest = [shortest_flip(router, start, inside, changes, torch.inf) for changes in kinds]
    delta, size = (torch.cat(parts) for parts in zip(*nearest, strict=True))
    count = len(kinds)
    walked = _walk(router, start.repeat(count, 1), delta, size, inside.repeat(count, 1), steps)
    return walked.view(count, -1).amin(dim=0)


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
    """Compute changes [C, T, D] of the input near the closest points where two experts tie."""
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
        shrunk, shrunk_size = shortest_flip(
            router, start, inside, candidate[None], size, halvings=12
        )
        better = shrunk_size < size
        delta = torch.where(better[:, None], shrunk, delta)
        size = torch.where(better, shrunk_size, size)
        share = torch.where(better, (share * 1.5).clamp_max(1), share / 2)
    return torch.minimum(size, shortest_flip(router, start, inside, delta[None], size)[1])


@torch.no_grad()
def shortest_flip(
    router: nn.Module,
    start: Tensor,
    inside: Tensor,
    changes: Tensor,
    limit: Tensor | float,
    halvings: int = 30,
) -> tuple[Tensor, Tensor]:
    """Shortest flipped point [T, D] on the way to any of ``changes`` [C, T, D], and its norm.

    By bisection, from which a change drops out once it is sure to end longer than another of its
    token, or than the token's ``limit`` [T]. The norm is infinite where no change flips.
    """
    count, tokens = changes.shape[:2]
    delta = changes.flatten(0, 1)
    norm = torch.linalg.vector_norm(delta, dim=1)  # [C T], like all that follows
    token = torch.arange(len(delta), device=start.device) % tokens
    high, size = torch.ones_like(norm), torch.full_like(norm, torch.inf)
    ways = _Ways(delta, start.index_select(0, token), inside.index_select(0, token))

    rows = torch.arange(len(delta), device=start.device)
    flips = ways.flipped(router, high)
    rows, ways = rows[flips], ways.only(flips)
    low, up, long, of = torch.zeros_like(norm[rows]), high[rows], norm[rows], token[rows]
    for _ in range(halvings):
        if not len(rows):
            break
        middle = (low + up) / 2
        flips = ways.flipped(router, middle)
        low, up = torch.where(flips, low, middle), torch.where(flips, middle, up)
        high[rows], size[rows] = up, up * long
        least = size.view(count, -1).amin(dim=0).clamp_max(limit)
        short = low * long <= least[of]
        if not short.all():
            rows, ways = rows[short], ways.only(short)
            low, up, long, of = low[short], up[short], long[short], of[short]
    size[rows] = torch.linalg.vector_norm(high[rows, None] * delta[rows], dim=1)
    shortest = size.view(count, -1).min(dim=0)
    chosen = shortest.indices * tokens + torch.arange(tokens, device=start.device)
    return high[chosen, None] * delta[chosen], shortest.values


class _Ways(NamedTuple):
    """Ways from tokens to changed ones [W, D], and the decision inside [W, N] of each."""

    delta: Tensor
    start: Tensor
    inside: Tensor

    def flipped(self, router: nn.Module, share: Tensor) -> Tensor:
        """Tell whether the decision is another one after a share [W] of each way."""
        point = (share[:, None] * self.delta).add_(self.start)
        return decision_gap(_logits(router, point), self.inside) <= 0

    def only(self, kept: Tensor) -> "_Ways":
        """Return the ways that a mask [W] keeps."""
        return _Ways(*(part[kept] for part in self))
