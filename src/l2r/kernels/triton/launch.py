"""Launches of the Triton kernels: shapes, block sizes, no autograd.

Block sizes are a fixed function of the shapes, not searched at run time: results are the same in
every process, a first call compiles and nothing more, and a CUDA graph can be captured at once.
Nothing here waits for the device.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

from l2r.kernels import contract
from l2r.kernels.contract import (
    SCORINGS,
    Options,
    Score,
    Tensors,
    backward_in_stages,
    empty_grads,
    empty_results,
    first_input,
    forward_in_stages,
    in_one_stage,
    sizes_of,
)
from l2r.kernels.triton import backward as kernels
from l2r.kernels.triton.backward_project import project_backward_kernel, project_reduce_kernel
from l2r.kernels.triton.forward import forward_kernel

_PROGRAMS = 512  # programs wanted for a sum over tokens: about four per multiprocessor
_REDUCERS = 64  # programs wanted for adding partial sums: one that adds many waits for memory
_PARTIAL_NUMBERS = 2**21  # most numbers that the partial sums of one launch hold


def forward(given: Tensors, options: Options) -> Tensors:
    """Results of the given stages, in one launch where they fit; see ``contract.Backend``."""
    tokens, hidden, rank, experts, heads = sizes_of(given)
    if not in_one_stage(given, options) and not _one_launch(rank, experts):
        return forward_in_stages(forward, given, options)
    done = empty_results(given, options._replace(save=True))
    if tokens == 0:
        return done
    score, blocks = options.score, _forward_blocks(given, options.top_k)
    logits_alone = given.x is None and options.top_k == 0
    columns = triton.cdiv(experts, blocks["BN"]) if logits_alone else 1
    with _on_device(first_input(given)):
        forward_kernel[(triton.cdiv(tokens, blocks["BT"]), columns)](
            *done,
            tokens,
            hidden,
            experts,
            options.top_k,
            *score[1:],
            NORMALIZE=options.normalize,
            SCORING=SCORINGS[score.scoring],
            H=max(1, heads),
            R=max(1, rank),
            RP=_lanes(rank),
            **blocks,
        )
    return done


def backward(tensors: Tensors, up: Tensors, options: Options) -> Tensors:
    """Gradients of what was given, stage after stage; see ``contract.Backend``."""
    if not in_one_stage(tensors, options):
        return backward_in_stages(backward, tensors, up, options)
    grads = empty_grads(tensors, options)
    with _on_device(first_input(tensors)):
        if tensors.x is not None:
            _project_backward(tensors, up, grads)
        elif tensors.anchors is not None:
            _score_backward(tensors, up, grads, options.score)
        else:
            _select_backward(tensors, up, grads, options)
    return grads


def _forward_blocks(given: Tensors, top_k: int) -> dict[str, int]:
    """Block sizes of a forward launch: of tokens, hidden and experts; and its warps."""
    _, hidden, rank, experts, _ = sizes_of(given)
    project, row = given.x is not None, _power(experts, 16)
    columns = row if top_k or project else min(row, 64)
    if _lanes(rank) >= 16 and (project or given.anchors is not None):
        warps = 4 if columns <= 256 else 8
        return {"BT": 16, "BD": min(_power(hidden, 16), 64), "BN": columns, "num_warps": warps}
    width, tokens = 16, max(1, min(2048 // columns, 16))
    if project:
        width = min(_power(hidden, 16), 2048)
        tokens = max(1, min(8192 // width, 8, 4096 // columns))
    return {"BT": tokens, "BD": width, "BN": columns, "num_warps": 4}


def _one_launch(rank: int, experts: int) -> bool:
    """Whether all stages fit in one program's registers and shared memory."""
    return experts <= 512 if _lanes(rank) < 16 else _power(experts, 16) * rank <= 8192


def _select_backward(tensors: Tensors, up: Tensors, grads: Tensors, options: Options) -> None:
    tokens, _, _, experts, _ = sizes_of(tensors)
    columns = _power(experts, 16)
    rows = max(1, min(2048 // columns, 16))
    kernels.select_backward_kernel[(triton.cdiv(tokens, rows),)](
        tensors.logits,
        tensors.weights,
        tensors.indices,
        tensors.lse,
        up.logits,
        up.weights,
        grads.logits,
        tokens,
        experts,
        options.top_k,
        NORMALIZE=options.normalize,
        BT=rows,
        BN=columns,
    )


def _score_backward(tensors: Tensors, up: Tensors, grads: Tensors, score: Score) -> None:
    anchors = tensors.anchors
    assert anchors is not None
    tokens, _, rank, experts, heads = sizes_of(tensors)
    lanes = _lanes(rank)
    shared = {"SCORING": SCORINGS[score.scoring], "H": heads, "R": rank, "RP": lanes}
    inputs = (tensors.query, tensors.rho_hat, anchors, tensors.logits, up.logits)
    rows, most = (16, 64) if lanes >= 16 else (8, 256)
    columns = min(_power(experts * heads, 16), most)
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
    partial, per_split = _partial_sums(tokens, rows, blocks, anchors)
    kernels.anchors_backward_kernel[(blocks, len(partial))](
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
    columns = max(1, min(_power(experts * heads, 1) // _REDUCERS, 32))
    kernels.anchors_reduce_kernel[(triton.cdiv(experts * heads, columns),)](
        partial,
        anchors,
        grads.anchors,
        experts,
        len(partial),
        score.p,
        score.eps,
        **shared,
        BC=columns,
        BS=_at_once(len(partial), columns * lanes),
    )


def _project_backward(tensors: Tensors, up: Tensors, grads: Tensors) -> None:
    weight = tensors.weight
    assert weight is not None
    tokens, hidden, rank, *_ = sizes_of(tensors)
    lanes = _lanes(rank)
    width, rows = min(_power(hidden, 16), 64 if lanes >= 16 else 256), 16
    blocks = triton.cdiv(hidden, width)
    partial, per_split = _partial_sums(tokens, rows, blocks, weight)
    project_backward_kernel[(blocks, len(partial))](
        tensors.x,
        weight,
        tensors.gain,
        tensors.query,
        tensors.rstd,
        up.query,
        grads.x,
        partial,
        tokens,
        hidden,
        per_split,
        R=rank,
        RP=lanes,
        BT=rows,
        BD=width,
    )
    width = max(1, min(_power(hidden, 1) // _REDUCERS, 32))
    project_reduce_kernel[(triton.cdiv(hidden, width),)](
        partial,
        weight,
        tensors.gain,
        grads.weight,
        grads.gain,
        hidden,
        len(partial),
        R=rank,
        RP=lanes,
        BD=width,
        BS=_at_once(len(partial), width * lanes),
    )


def _partial_sums(tokens: int, rows: int, blocks: int, like: Tensor) -> tuple[Tensor, int]:
    """Room [splits, ...] for sums over parts of the tokens, and tokens per part (whole blocks)."""
    wanted = min(triton.cdiv(_PROGRAMS, blocks), max(1, _PARTIAL_NUMBERS // like.numel()))
    per_split = triton.cdiv(triton.cdiv(tokens, wanted), rows) * rows
    splits = triton.cdiv(tokens, per_split)
    return contract.empty(splits, *like.shape, like=like, dtype=torch.float32), per_split


def _at_once(splits: int, numbers: int) -> int:
    """Partial sums that a reducing program reads at a time; each more costs a trip to memory."""
    return min(_power(splits, 1), max(1, 4096 // numbers))


def _lanes(rank: int) -> int:
    """Lanes that a rank takes; from 16 on products over it run on the matrix units."""
    lanes = _power(rank, 1)
    return lanes if lanes <= 4 else max(16, lanes)


def _power(size: int, smallest: int) -> int:
    return max(smallest, triton.next_power_of_2(max(1, size)))


def _on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's device, also where another one is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
