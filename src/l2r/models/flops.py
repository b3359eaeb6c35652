"""Floating-point operations of a forward pass by module, counted without doing them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def forward_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """FLOPs of matrix products by module name, ``""`` for the whole; a multiply-add counts as 2.

    ``model`` and ``inputs`` are on the meta device; the model becomes bf16, the only dtype of
    grouped_mm there.
    """
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_mm_flops}
    )
    with counter, torch.no_grad():
        model.eval().to(torch.bfloat16)(**inputs)
    counts, root = counter.get_flop_counts(), type(model).__name__
    by_name = {name: counts.get(f"{root}.{name}", {}) for name, _ in model.named_modules()}
    return {
        **{name: sum(operations.values()) for name, operations in by_name.items()},
        "": counter.get_total_flops(),
    }


def _grouped_mm_flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Every row meets the matrix of one expert: rows [S, I], weight [N, I, O]."""
    return 2 * rows[0] * rows[1] * weight[2]
