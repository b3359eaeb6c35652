"""Calls of the compiled router: tensors to pointers, constants to a structure, threads."""

import ctypes
import struct
from functools import lru_cache

import torch

from l2r.kernels.contract import (
    SCORINGS,
    Options,
    Score,
    Tensors,
    empty_grads,
    empty_results,
    sizes_of,
)
from l2r.kernels.native.build import library

_packed = struct.Struct(f"{len(Tensors._fields)}P").pack  # half the time of a ctypes array


class _Score(ctypes.Structure):
    _fields_ = [("scoring", ctypes.c_int32)] + [
        (name, ctypes.c_float) for name in Score._fields[1:]
    ]


def forward(given: Tensors, options: Options) -> Tensors:
    """Results of the given stages in one pass over the tokens."""
    done = empty_results(given, options)
    _run("l2r_forward", options, done)
    return done


def backward(tensors: Tensors, up: Tensors, options: Options) -> Tensors:
    """Gradients of what was given, in one pass over the tokens."""
    grads = empty_grads(tensors, options)
    _run("l2r_backward", options, tensors, up, grads)
    return grads


def _run(name: str, options: Options, *tensors: Tensors) -> None:
    kernels = library()
    assert kernels is not None  # asked by the caller
    sizes = (*sizes_of(tensors[0]), options.top_k)
    score, threads = _structure(options.score), _threads(sizes)
    pointers = [_packed(*[0 if t is None else t.data_ptr() for t in each]) for each in tensors]
    getattr(kernels, name)(_sizes(sizes), score, threads, options.normalize, *pointers)


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
