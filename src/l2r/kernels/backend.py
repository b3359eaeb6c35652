"""Types that the fused backends share, and which of them serves a tensor."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import NamedTuple

from torch import Tensor


class Score(NamedTuple):
    """Constants of a score; ``scale`` multiplies the pooled logits (one over the temperature)."""

    scoring: str
    gamma: float
    beta: float
    p: float
    eps: float
    scale: float


class Selected(NamedTuple):
    """weights [T, K], indices [T, K], log-sum-exp [T]; sums [2, N] of probabilities and choices.

    ``sums`` is empty unless asked for.
    """

    weights: Tensor
    indices: Tensor
    lse: Tensor
    sums: Tensor


FUSED = {"cpu": "l2r.kernels.cpu", "triton": "l2r.kernels.triton_backend"}


class Choice:
    """Name of the implementation forced by ``dispatch.implementation``, None to choose."""

    forced: str | None = None


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def name_for(tensor: Tensor) -> str:
    """Fused backend for the device of a tensor: ``triton``, ``cpu``, or ``plain`` for none."""
    if Choice.forced is not None:
        return Choice.forced
    if tensor.is_cuda:
        return "triton" if has_triton() else "plain"
    return "cpu" if tensor.device.type == "cpu" else "plain"


def module(name: str) -> ModuleType:
    """Module with the launches of a fused backend."""
    return importlib.import_module(FUSED[name])
