"""Launches of the Triton kernels: shapes, block sizes, no autograd.

Block sizes are a fixed function of the shapes, not searched at run time: results are the same in
every process, a first call compiles and nothing more, and a CUDA graph can be captured at once.
Nothing here waits for the device.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from l2r.kernels import contract
from l2r.kernels.contract import (
    DEFAULTS,
    SCORINGS,
    Grads,
    Score,
    Tensors,
    Upstream,
    backward_in_stages,
    empty_grads,
    empty_results,
    first_input,
    forward_in_stages,
    sizes_of,
)
from l2r.kernels.triton import backward as kernels
from l2r.kernels.triton.backward_project import project_backward_kernel, project_reduce_kernel
from l2r.kernels.triton.forward import forward_kernel

_PROGRAMS = 512  # programs wanted for a sum over tokens: about four per multiprocessor
_PARTIAL_NUMBERS = 2**21  # most numbers that the partial sums of one launch hold


def forward(
    given: Tensors,
    score: Score = DEFAULTS,
    *,
    top_k: int = 0,
    normalize: bool = False,
    save: bool = True,
) -> Tensors:
    """Results of the given stages, in one launch where they fit; see ``contract.Backend``."""
    project, scores, select = given.x is not None, given.anchors is not None, top_k > 0
    tokens, hidden, rank, experts, heads, _ = sizes_of(given)
    if project + scores + select > 1 and not _one_launch(rank, experts):
        return forward_in_stages(forward, given, score, top_k=top_k, normalize=normalize, save=save)
    done = empty_results(given, top_k=top_k)
    if tokens == 0:
        return done
    padded, dot = _padded(rank)
    blocks = _forward_blocks(
        rank=rank, hidden=hidden, experts=experts, project=project, score=scores, select=select
    )
    columns = triton.cdiv(experts, blocks.experts) if scores and not (project or select) else 1
    with _on_device(first_input(given)):
        forward_kernel[(triton.cdiv(tokens, blocks.tokens), columns)](
            *done,
            tokens,
            hidden,
            experts,
            top_k,
            *score[1:],
            NORMALIZE=normalize,
            SCORING=SCORINGS[score.scoring],
            H=max(1, heads),
            R=max(1, rank),
            RP=padded,
            DOT=dot,
            BT=blocks.tokens,
            BD=blocks.hidden,
            BN=blocks.experts,
            num_warps=blocks.warps,
        )
    return done


def backward(
    tensors: Tensors,
    up: Upstream,
    score: Score = DEFAULTS,
    *,
    normalize: bool = False,
    need_x: bool = False,
) -> Grads:
    """Gradients of what was given, stage after stage; see ``contract.Backend``."""
    x, anchors, weights = tensors.x, tensors.anchors, tensors.weights
    if (x is not None) + (anchors is not None) + (weights is not None) > 1:
        return backward_in_stages(backward, tensors, up, score, normalize=normalize, need_x=need_x)
    grads = empty_grads(tensors, need_x=need_x)
    with _on_device(first_input(tensors)):
        if x is not None:
            _project_backward(tensors, up, grads)
        elif anchors is not None:
            _score_backward(tensors, up, grads, score)
        else:
            _select_backward(tensors, up, grads, normalize=normalize)
    return grads


class _Blocks(NamedTuple):
    """Block sizes of a forward launch."""

    tokens: int
    hidden: int
    experts: int
    warps: int


def _forward_blocks(
    *, rank: int, hidden: int, experts: int, project: bool, score: bool, select: bool
) -> _Blocks:
    row = _power(experts, 16)
    columns = row if select or project else min(row, 64)
    if _padded(rank)[1] and (project or score):
        warps = 4 if columns <= 256 else 8
        return _Blocks(16, min(_power(hidden, 16), 64), columns, warps)
    if project:
        width = min(_power(hidden, 16), 2048)
        return _Blocks(max(1, min(8192 // width, 8, 4096 // columns)), width, columns, 4)
    return _Blocks(max(1, min(2048 // columns, 16)), 16, columns, 4)


def _one_launch(rank: int, experts: int) -> bool:
    """Whether all stages fit in one program's registers and shared memory."""
    return experts <= 512 if not _padded(rank)[1] else _power(experts, 16) * rank <= 8192


def _select_backward(tensors: Tensors, up: Upstream, grads: Grads, *, normalize: bool) -> None:
    tokens, _, _, experts, _, top_k = sizes_of(tensors)
    columns = _power(experts, 16)
    rows = max(1, min(2048 // columns, 16))
    kernels.select_backward_kernel[(triton.cdiv(tokens, rows),)](
        *tensors[6:10],
        up.logits,
        up.weights,
        grads.logits,
        tokens,
        experts,
        top_k,
        NORMALIZE=normalize,
        BT=rows,
        BN=columns,
        num_warps=4,
    )


def _score_backward(tensors: Tensors, up: Upstream, grads: Grads, score: Score) -> None:
    anchors, query, rho_hat = tensors.anchors, tensors.query, tensors.rho_hat
    assert anchors is not None and query is not None
    tokens, _, rank, experts, heads, _ = sizes_of(tensors)
    padded, dot = _padded(rank)
    anchor_sizes = {"SCORING": SCORINGS[score.scoring], "H": heads, "R": rank, "RP": padded}
    shared = {**anchor_sizes, "DOT": dot, "num_warps": 4}
    inputs = (query, rho_hat, anchors, tensors.logits, up.logits)
    columns, rows = min(_power(experts * heads, 16), 64 if dot else 256), 16 if dot else 8
    kernels.query_backward_kernel[(triton.cdiv(tokens, rows),)](
        *inputs,
        grads.query,
        grads.rho_hat,
        tokens,
        experts,
        *score[1:6],
        **shared,
        BT=rows,
        BC=columns,
    )
    columns, rows = min(columns, 64), 32
    blocks = triton.cdiv(experts * heads, columns)
    splits, per_split = _splits(tokens, rows, blocks, anchors.numel())
    partial = contract.empty(splits, *anchors.shape, like=anchors, dtype=torch.float32)
    kernels.anchors_backward_kernel[(blocks, splits)](
        *inputs,
        partial,
        tokens,
        experts,
        per_split,
        *score[1:6],
        **shared,
        BT=rows,
        BC=columns,
    )
    columns = min(_power(experts * heads, 16), 32)
    kernels.anchors_reduce_kernel[(triton.cdiv(experts * heads, columns),)](
        partial,
        anchors,
        grads.anchors,
        experts,
        splits,
        score.p,
        score.eps,
        **anchor_sizes,
        BC=columns,
        BS=min(_power(splits, 1), max(1, 4096 // (columns * padded))),
        num_warps=4,
    )


def _project_backward(tensors: Tensors, up: Upstream, grads: Grads) -> None:
    x, weight, gain, _, query, rstd, *_ = tensors
    assert x is not None and weight is not None
    tokens, hidden, rank, *_ = sizes_of(tensors)
    padded, dot = _padded(rank)
    width, rows = min(_power(hidden, 16), 64 if dot else 256), 16
    blocks = triton.cdiv(hidden, width)
    splits, per_split = _splits(tokens, rows, blocks, rank * hidden)
    partial = contract.empty(splits, rank, hidden, like=weight, dtype=torch.float32)
    project_backward_kernel[(blocks, splits)](
        x,
        weight,
        gain,
        query,
        rstd,
        up.query,
        grads.x,
        partial,
        tokens,
        hidden,
        per_split,
        R=rank,
        RP=padded,
        DOT=dot,
        BT=rows,
        BD=width,
        num_warps=4,
    )
    project_reduce_kernel[(triton.cdiv(hidden, 32),)](
        partial,
        weight,
        gain,
        grads.weight,
        grads.gain,
        hidden,
        splits,
        R=rank,
        BD=32,
        BS=min(_power(splits, 1), 64),
        num_warps=4,
    )


def _splits(tokens: int, rows: int, blocks: int, numbers: int) -> tuple[int, int]:
    """Into how many parts a sum over tokens is split, and tokens per part (whole blocks)."""
    wanted = min(triton.cdiv(_PROGRAMS, blocks), max(1, _PARTIAL_NUMBERS // max(1, numbers)))
    per_split = triton.cdiv(triton.cdiv(tokens, max(1, wanted)), rows) * rows
    return triton.cdiv(tokens, per_split), per_split


def _padded(rank: int) -> tuple[int, bool]:
    """Lanes that a rank takes, and whether products over it run on the matrix units."""
    lanes = _power(rank, 1)
    return (lanes, False) if lanes <= 4 else (max(16, lanes), True)


def _power(size: int, smallest: int) -> int:
    return max(smallest, triton.next_power_of_2(max(1, size)))


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's device, also where another one is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
