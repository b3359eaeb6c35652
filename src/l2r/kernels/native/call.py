"""Calls of the compiled router: sizes, constants and tensors to the structures of router.h."""

from struct import Struct

import torch

from l2r.kernels.contract import (
    SCORINGS,
    Options,
    Tensors,
    empty_grads,
    empty_results,
    sizes_of,
)
from l2r.kernels.native.build import library

# Bytes, which ctypes passes as their address: half the time of ctypes' own structures.
_sizes, _score = Struct("6q").pack, Struct("i6f").pack
_pointers = Struct(f"{len(Tensors._fields)}P").pack


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
    scoring, *constants = options.score
    getattr(kernels, name)(
        _sizes(*sizes),
        _score(SCORINGS[scoring], *constants),
        _threads(sizes),
        options.normalize,
        *[_pointers(*[0 if t is None else t.data_ptr() for t in each]) for each in tensors],
    )


def _threads(sizes: tuple[int, ...]) -> int:
    """Threads worth starting: one for every 2**15 numbers."""
    tokens, hidden, _, experts, heads, _ = sizes
    work = tokens * (hidden + experts * max(1, heads))
    return 1 if work < 2**16 else min(torch.get_num_threads(), tokens, work // 2**15)
