"""Types that the fused backends share, and which of them serves a tensor."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
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


class Upstream(NamedTuple):
    """Gradients of logits [T, N], weights [T, K], log-sum-exp [T] and probability sums [N]."""

    logits: Tensor | None = None
    weights: Tensor | None = None
    lse: Tensor | None = None
    share: Tensor | None = None


class Saved(NamedTuple):
    """What the backward of a whole router needs; 1 / rms is empty without a gain."""

    x: Tensor
    weight: Tensor
    gain: Tensor | None
    anchors: Tensor
    query: Tensor
    rstd: Tensor
    logits: Tensor
    selected: Selected


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


@cache
def module(name: str) -> ModuleType:
    """Module with the launches of a fused backend."""
    return importlib.import_module(FUSED[name])


def route_backward_in_parts(
    name: str, saved: Saved, up: Upstream, *, constants: Score, normalize: bool, need_x: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, W_q, gain and anchors by the three backward passes of a backend."""
    backend = module(name)
    x, weight, gain, anchors, query, rstd, logits, selected = saved
    grad = backend.select_backward(logits, selected, up, normalize=normalize)
    grad, grad_anchors, _ = backend.score_backward(grad, query, anchors, None, logits, constants)
    ends = backend.project_backward(grad, x, weight, gain, query, rstd, need_x=need_x)
    return *ends, grad_anchors


def ends_like(
    x: Tensor, weight: Tensor, gain: Tensor | None, need_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the gradients of x (empty unless needed), W_q and the gain (empty without one)."""
    return (
        x.new_empty(x.shape if need_x else (0, x.shape[1])),
        torch.empty_like(weight, memory_format=torch.contiguous_format),
        weight.new_empty(0 if gain is None else x.shape[1]),
    )
