"""Robustness of routing to Gaussian noise on the router input (paper, Appendix A.2).

Shape letters: T tokens, D hidden size, K experts chosen per token.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.routers.observe import chosen_too, evaluating, first_choice
from l2r.stats.intervals import Interval, mean_interval

CHUNK = 4096  # tokens that are perturbed at once
MOST_SIGMA = 1e6  # squares of noisy inputs stay far from the end of fp32


def check_sigma(sigma: float) -> None:
    """Raise ValueError for a sigma that is negative, above a million or no number."""
    if not 0 <= sigma <= MOST_SIGMA:
        raise ValueError(f"sigma must be between 0 and {MOST_SIGMA:,.0f}; got {sigma}")


def top_k_overlap(first: Int[Tensor, "T K"], second: Int[Tensor, "T K"]) -> Float[Tensor, " T"]:
    """Jaccard similarity of two sets of K experts per token: |A and B| / |A or B|."""
    both = chosen_too(first, second).sum(dim=-1).double()
    return both / (2 * first.shape[1] - both)


@torch.no_grad()
def perturbation_stability(
    router: nn.Module,
    x: Float[Tensor, "*B D"],
    sigma: float = 0.02,
    seed: int = 0,
    repeats: int = 5,
    more: tuple[Tensor, ...] = (),
) -> dict[str, Interval]:
    """Stability and Top-k Overlap under x + sigma * noise, each as mean and 95% interval.

    stability: share of tokens whose first expert stays. topk_overlap: mean Jaccard similarity
    of the chosen sets. The interval covers the repeats of the noise, not the choice of tokens.

    ``router`` is any module that returns (logits, weights, indices); it runs in evaluation
    mode and gets x in the shape and dtype that are given. ``more`` holds its further arguments.
    The noise is drawn on the CPU from ``seed``, the same on every device.

    Raises ValueError for a sigma as ``check_sigma``, no tokens or repeats < 1.
    """
    check_sigma(sigma)
    tokens = x.shape[:-1].numel()
    if repeats < 1 or tokens < 1:
        raise ValueError(f"need repeats >= 1 and tokens >= 1; got {repeats} and {tokens}")
    generator = torch.Generator().manual_seed(seed)
    kept, overlaps = [0.0] * repeats, [0.0] * repeats
    with evaluating(router):
        for part in torch.split(x, CHUNK, dim=-2):
            _, weights, chosen = router(part, *more)
            first = first_choice(weights, chosen)
            for repeat in range(repeats):
                noise = torch.randn(part.shape, generator=generator).to(part)
                _, noisy_weights, noisy = router(part + sigma * noise, *more)
                same = first_choice(noisy_weights, noisy) == first
                kept[repeat] += same.sum().item()
                overlaps[repeat] += top_k_overlap(chosen, noisy).sum().item()
    return {
        "stability": mean_interval([value / tokens for value in kept]),
        "topk_overlap": mean_interval([value / tokens for value in overlaps]),
    }
