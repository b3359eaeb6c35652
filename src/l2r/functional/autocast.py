"""Autocast for operations that it does not cover: our grouped products, and sums kept wide."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocasts(device: torch.device) -> bool:
    """Tell whether autocast is on; the meta device, on which models are counted, has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which sums, losses and statistics keep the dtype of their inputs."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def product_inputs(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in autocast's dtype, as torch casts for its own products; float64 stays."""
    if x.dtype == torch.float64 or not autocasts(x.device):
        return x, weight
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), weight.to(dtype)
