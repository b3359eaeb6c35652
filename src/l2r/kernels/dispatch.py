"""Choose an implementation; every router calls these functions.

All implementations have the signatures and results of ``l2r.kernels.plain``: Triton kernels on a
GPU, C++ or blocked code on a CPU, and plain code where neither applies (float64, functorch
transforms, forward-mode derivatives, export, other devices, sizes beyond the GPU's kernels).
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, is_grad_enabled

from l2r import functional
from l2r.functional.autocast import without_autocast
from l2r.functional.scoring import DEFAULTS, ScoreConstants
from l2r.kernels import cpu, plain
from l2r.kernels.checks import DTYPES, beyond_triton, check, check_routes
from l2r.kernels.contract import Options, Tensors, first_input
from l2r.kernels.operation import BACKENDS, run
from l2r.kernels.plain import KernelWeights, Routed
from l2r.kernels.tracing import exported, traced, transformed, untouched

# Least logits of a selection with a gradient on a CPU; with fewer, torch's derivatives are faster.
_MIN_LOGITS = 2**13
_CPU = (None, "cpu")  # names of an implementation with which the CPU's code runs on a CPU

followed = plain.followed
linear_logits = plain.linear_logits  # one matrix product: the libraries' own is the fused form
anchor_logits = plain.anchor_logits  # for routers that change the query before


def routing_query(
    x: Float[Tensor, "T D"],
    projection: Float[Tensor, "R D"],
    gain: Float[Tensor, " D"] | None = None,
    score: ScoreConstants = DEFAULTS,
) -> Float[Tensor, "T R"]:
    """Query of the router input, with autocast off; see ``plain.routing_query``."""
    with without_autocast(x.device):
        return plain.routing_query(x, projection, gain, score)


def softmax_top_k(
    logits: Float[Tensor, "T N"],
    top_k: int,
    *,
    normalize: bool = False,
    routes: Int[Tensor, "T K"] | None = None,
) -> tuple[Float[Tensor, "T K"], Int[Tensor, "T K"]]:
    """Softmax over experts and the k largest, or those given; see ``plain.softmax_top_k``."""
    results = _fused(Tensors(logits=logits, routes=routes), DEFAULTS, top_k, normalize)
    if results is not None:
        return results.weights, results.indices
    _check_read(routes, logits.shape[1])
    indices = followed(best_experts(logits, top_k), routes)
    return functional.selection.softmax_weights(logits, indices, normalize=normalize), indices


def best_experts(ranking: Float[Tensor, "T N"], top_k: int) -> Int[Tensor, "T K"]:
    """Return indices of the k largest, which have no gradient; see ``functional.best_experts``."""
    ranking = ranking.detach()
    results = _fused(Tensors(logits=ranking), DEFAULTS, top_k)
    return functional.best_experts(ranking, top_k) if results is None else results.indices


def route_logits(
    x: Float[Tensor, "T D"], parts: KernelWeights, score: ScoreConstants
) -> Float[Tensor, "T N"]:
    """Run the whole router but for the selection; see ``plain.route_logits``."""
    results = _fused(Tensors(x, *parts), score)
    return plain.route_logits(x, parts, score) if results is None else results.logits


def route(
    x: Float[Tensor, "T D"],
    parts: KernelWeights,
    score: ScoreConstants,
    *,
    top_k: int,
    normalize: bool = False,
    routes: Int[Tensor, "T K"] | None = None,
) -> Routed:
    """Run the whole router in one pass; see ``plain.route``."""
    if not is_grad_enabled() and _Forced.name in _CPU and untouched(x, *parts, routes):
        inferred = cpu.infer(x, parts, score, top_k, normalize, routes)
        if inferred is not None:
            return inferred
    results = _fused(Tensors(x, *parts, routes=routes), score, top_k, normalize)
    if results is None:
        _check_read(routes, len(parts[2]))
        return plain.route(x, parts, score, top_k=top_k, normalize=normalize, routes=routes)
    return results.logits, results.weights, results.indices


class _Forced:
    """Name of the implementation set by ``implementation``; None: by device."""

    name: str | None = None


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Use ``plain``, ``cpu`` or ``triton`` code inside the block, whatever the device.

    It holds in every thread, as backward runs in others: do not use two at the same time.
    Raises ValueError for another name.
    """
    if name not in ("plain", *BACKENDS):
        raise ValueError(f"implementation must be plain, {' or '.join(BACKENDS)}; got {name!r}")
    previous, _Forced.name = _Forced.name, name
    try:
        yield
    finally:
        _Forced.name = previous


def _named_for(tensor: Tensor) -> str | None:
    """Fused backend for the device of a tensor, or the forced one; None for plain code."""
    if _Forced.name is not None:
        return None if _Forced.name == "plain" else _Forced.name
    if tensor.is_cpu:
        return "cpu"
    return "triton" if tensor.is_cuda and has_triton() else None


def _fused(
    given: Tensors, score: ScoreConstants, top_k: int | None = None, normalize: bool = False
) -> Any:
    """Return the results of the backend for the first tensor's device; None for plain code.

    Raises ValueError for tensors that do not fit together, in plain code as in the others.
    """
    check(given, top_k)
    first, present = first_input(given), [tensor for tensor in given if tensor is not None]
    name, watched = _named_for(first), traced(*present)
    if name is None or not DTYPES.issuperset(
        [tensor.dtype for tensor in present if tensor is not given.routes]
    ):
        return None
    if (watched and exported()) or transformed():
        return None
    if name == "cpu" and first is given.logits:
        derived = first.requires_grad and torch.is_grad_enabled()
        if watched or (derived and first.numel() < _MIN_LOGITS):
            return None
    if name == "triton" and beyond_triton(given):
        return None
    return run(name, watched, given, Options(score, top_k or 0, normalize))


def _check_read(routes: Tensor | None, experts: int) -> None:
    """Check given routes for plain code, unless something traces or transforms it."""
    if routes is not None and not (traced(routes) or transformed()):
        check_routes(routes, experts)


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
