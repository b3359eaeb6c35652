"""Calls of the compiled router: tensors to pointers, constants to a structure, threads."""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from l2r.kernels.contract import (
    SCORINGS,
    Grads,
    Score,
    Tensors,
    Upstream,
    empty_grads,
    empty_results,
    sizes_of,
)
from l2r.kernels.native import build


class _Score(ctypes.Structure):
    _fields_ = [("scoring", ctypes.c_int32)] + [
        (name, ctypes.c_float) for name in Score._fields[1:]
    ]


def forward(given: Tensors, score: Score, *, top_k: int, normalize: bool, save: bool) -> Tensors:
    """Results of the given stages in one pass over the tokens."""
    done = empty_results(given, top_k=top_k, save=save)
    _run("l2r_forward", sizes_of(done), score, normalize, done[:-1])
    return done


def backward(
    tensors: Tensors, up: Upstream, score: Score, *, normalize: bool, need_x: bool
) -> Grads:
    """Gradients of what was given, in one pass over the tokens."""
    grads = empty_grads(tensors, need_x=need_x)
    pointed = (*tensors[:-1], *up, *grads[:-1])
    _run("l2r_backward", sizes_of(tensors), score, normalize, pointed)
    return grads


def _run(
    name: str,
    sizes: tuple[int, ...],
    score: Score,
    normalize: bool,
    tensors: tuple[Tensor | None, ...],
) -> None:
    library = build.library()
    assert library is not None  # asked by the caller
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    call = getattr(library, name)
    call(_sizes(sizes), _structure(score), _threads(sizes), normalize, *addresses)


def _threads(sizes: tuple[int, ...]) -> int:
    """Threads worth starting: one for every 2**15 numbers."""
    tokens, hidden, _, experts, heads, _ = sizes
    work = tokens * (hidden + experts * max(1, heads))
    return 1 if work < 2**16 else min(torch.get_num_threads(), tokens, work // 2**15)


@lru_cache(maxsize=256)
def _sizes(sizes: tuple[int, ...]) -> object:
    return (ctypes.c_int64 * 6)(*sizes)


@lru_cache(maxsize=256)
def _structure(score: Score) -> object:
    return ctypes.byref(_Score(SCORINGS[score.scoring], *score[1:]))
