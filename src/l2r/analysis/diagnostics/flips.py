"""Flipped routes: how many decisions change when the same weights compute in bf16.

Training and serving differ in their arithmetic; routers that are close to a tie then choose other
experts. Routers themselves keep their precision, as ours do in a bf16 load (hf/models/olmoe.py).
"""

import re
from collections.abc import Iterable
from copy import deepcopy
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from l2r.analysis.diagnostics.data_pass import Batch, Run
from l2r.errors import InputError
from l2r.routers import Captured, capture
from l2r.routers.observe import block_bias, evaluating, find_routers


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
    batches: Iterable[Batch],
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
    """Whether the sets of experts differ, by layer and token."""
    pairs = zip(first.indices(), second.indices(), strict=True)
    return torch.stack([(a.sort().values != b.sort().values).any(dim=1) for a, b in pairs])
