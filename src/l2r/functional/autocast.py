"""Autocast for what it does not know: products of ours, and sums it must leave alone."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on; the meta device, on which models are counted, has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Sums, losses and statistics in the dtype of their inputs; free where autocast is off."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def product_inputs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in autocast's dtype, as it does itself for torch's own products; float64 stays."""
    if x.dtype == torch.float64 or not autocasts(x.device):
        return x, weight
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype)
