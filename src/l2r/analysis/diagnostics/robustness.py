"""Robustness of routing: to Gaussian noise on the router input, and to arithmetic in bf16.

Noise is the paper's test (Appendix A.2). Training and serving differ in their arithmetic, and
routers that are close to a tie then choose other experts; routers themselves keep their precision
in a copy in bf16, as ours do in a bf16 load (hf/models/olmoe.py).

Shape letters: T tokens, D hidden size, K experts chosen per token, L layers.
"""

import re
from collections.abc import Iterable
from copy import deepcopy
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from l2r.analysis.diagnostics.data_pass import DataBatch, Run
from l2r.analysis.diagnostics.settings import check_sigma
from l2r.errors import InputError
from l2r.functional.selection import first_choice
from l2r.routers import Captured, capture
from l2r.routers.observe import block_bias, chosen_too, evaluating, find_routers
from l2r.stats.intervals import Interval, mean_interval

CHUNK = 4096  # tokens that are perturbed at once


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


class Flips(NamedTuple):
    """Shares in [0, 1]: of decisions (a token in a layer) with another set of experts, and of
    tokens with another set in any layer."""

    decisions: float
    tokens: float


def bf16_copy(model: nn.Module) -> nn.Module:
    """Copy of a model with the floats that it saves in bf16, but for those of its routers.

    Buffers that no checkpoint holds, such as the frequencies of rotary positions, keep their
    dtype, as in a bf16 load, and so does what the model keeps in float32. Selection biases belong
    to the routers, also where a block has them.
    Raises ValueError for a model without routers.
    """
    copy = deepcopy(model)
    kept: set[Tensor] = set()
    for path, router in find_routers(copy).items():
        kept |= {*router.parameters(), *router.buffers(), *block_bias(copy, path)}
    in_float32 = getattr(copy, "_keep_in_fp32_modules_strict", None) or ()  # transformers'
    pattern = re.compile("|".join(name.replace("*", ".*") for name in in_float32) or "(?!)")
    for name, tensor in copy.state_dict(keep_vars=True).items():
        if pattern.search(name) or not isinstance(tensor, Tensor):
            continue
        if tensor.is_floating_point() and tensor not in kept:
            tensor.data = tensor.data.bfloat16()
    return copy


@torch.no_grad()
def count_flips(
    model: nn.Module,
    other: nn.Module,
    batches: Iterable[DataBatch],
    run: Run,
) -> Flips:
    """Compare the experts that two models choose for the same batches.

    ``run(model, batch)`` makes the forward pass. Raises ValueError without a router or a batch.
    """
    decisions, tokens, count, layers = 0, 0, 0, 0
    with evaluating(model), evaluating(other):
        for batch in batches:
            with capture(model) as first:
                run(model, dict(batch))
            with capture(other) as second:
                run(other, dict(batch))
            changed = _changed(first, second)
            decisions += int(changed.sum())
            tokens += int(changed.any(dim=0).sum())
            layers, count = len(changed), count + changed.shape[1]
    if not count:
        raise InputError("batches must hold at least one; got none")
    return Flips(decisions / (count * layers), tokens / count)


def _changed(first: Captured, second: Captured) -> Bool[Tensor, "L T"]:
    """Tell whether the sets of experts differ, by layer and token."""
    pairs = zip(first.indices(), second.indices(), strict=True)
    return torch.stack([(a.sort().values != b.sort().values).any(dim=1) for a, b in pairs])
