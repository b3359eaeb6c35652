"""Launches of the Triton kernels: shapes, block sizes, no autograd.

Block sizes are a fixed function of the shapes, not searched at run time: results are the same in
every process, a first call compiles and nothing more, and a CUDA graph can be captured at once.
Nothing here waits for the device.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from l2r.kernels import contract
from l2r.kernels.contract import (
    SCORINGS,
    Options,
    ScoreConstants,
    Tensors,
    empty_grads,
    empty_results,
    first_input,
    sizes_of,
)
from l2r.kernels.stages import backward_in_stages, forward_in_stages, in_one_stage
from l2r.kernels.triton import backward as kernels
from l2r.kernels.triton.forward import forward_kernel

_PROGRAMS = 512  # programs wanted for a sum over tokens: about four per multiprocessor
_REDUCERS = 64  # programs wanted for adding partial sums: one that adds many waits for memory
_PARTIAL_NUMBERS = 2**21  # most numbers that the partial sums of one launch hold


class Call(NamedTuple):
    """Arguments of a kernel other than its tensors and T.

    D: hidden size. N: number of experts. K: number of experts to select. score: constants of the
    logits, the scoring by its number in ``SCORINGS``. H: anchors per expert. R: rank, in RP lanes.
    NORMALIZE: whether weights sum to 1. The scoring and the last four are known when a kernel is
    compiled.
    """

    D: int
    N: int
    K: int
    score: ScoreConstants
    H: Any
    R: Any
    RP: Any
    NORMALIZE: Any

    @classmethod
    def of(cls, tensors: Tensors, options: Options) -> "Call":
        """Build the arguments for the kernels of a call."""
        sizes, fixed = sizes_of(tensors), tl.constexpr
        score = options.score._replace(scoring=fixed(SCORINGS[options.score.scoring]))
        return cls(
            D=sizes.hidden,
            N=sizes.experts,
            K=options.top_k,
            score=score,
            H=fixed(max(1, sizes.heads)),
            R=fixed(max(1, sizes.rank)),
            RP=fixed(_lanes(sizes.rank)),
            NORMALIZE=fixed(options.normalize),
        )


def forward(given: Tensors, options: Options) -> Tensors:
    """Results of the given stages, in one launch where they fit; see ``contract.Backend``."""
    sizes = sizes_of(given)
    tokens, experts = sizes.tokens, sizes.experts
    if not in_one_stage(given, options) and not _one_launch(sizes.rank, experts):
        return forward_in_stages(forward, given, options)
    done = empty_results(given, options._replace(save=True))
    if tokens == 0:
        return done
    blocks = _forward_blocks(given, options.top_k)
    logits_alone = given.x is None and options.top_k == 0
    columns = triton.cdiv(experts, blocks["BN"]) if logits_alone else 1
    with torch.cuda.device_of(first_input(given)):  # type: ignore[no-untyped-call]
        grid = (triton.cdiv(tokens, blocks["BT"]), columns)
        forward_kernel[grid](done, Call.of(given, options), tokens, **blocks)
    return done


def backward(tensors: Tensors, up: Tensors, options: Options) -> Tensors:
    """Gradients of what was given, stage after stage; see ``contract.Backend``."""
    if not in_one_stage(tensors, options):
        return backward_in_stages(backward, tensors, up, options)
    grads, call = empty_grads(tensors, options), Call.of(tensors, options)
    with torch.cuda.device_of(first_input(tensors)):  # type: ignore[no-untyped-call]
        if tensors.x is not None:
            _project_backward(tensors, up, grads, call)
        elif tensors.anchors is not None:
            _score_backward(tensors, up, grads, call)
        else:
            _select_backward(tensors, up, grads, call)
    return grads


def _forward_blocks(given: Tensors, top_k: int) -> dict[str, int]:
    """Block sizes of a forward launch: of tokens, hidden and experts; and its warps."""
    sizes = sizes_of(given)
    hidden, project, row = sizes.hidden, given.x is not None, _power(sizes.experts, 16)
    columns = row if top_k or project else min(row, 64)
    if _lanes(sizes.rank) >= 16 and (project or given.anchors is not None):
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


def _select_backward(given: Tensors, up: Tensors, grads: Tensors, call: Call) -> None:
    tokens, columns = len(first_input(given)), _power(call.N, 16)
    rows = max(1, min(2048 // columns, 16))
    grid = (triton.cdiv(tokens, rows),)
    kernels.select_backward_kernel[grid](given, up, grads, call, tokens, BT=rows, BN=columns)


def _score_backward(given: Tensors, up: Tensors, grads: Tensors, call: Call) -> None:
    assert given.anchors is not None
    sizes = sizes_of(given)
    tokens, anchors, lanes = sizes.tokens, sizes.experts * sizes.heads, _lanes(sizes.rank)
    rows, most = (16, 64) if lanes >= 16 else (8, 256)
    columns = min(_power(anchors, 16), most)
    grid = (triton.cdiv(tokens, rows),)
    kernels.query_backward_kernel[grid](given, up, grads, call, tokens, BT=rows, BC=columns)
    columns, rows = min(columns, 64), 32
    blocks = triton.cdiv(anchors, columns)
    partial, per_split = _partial_sums(tokens, rows, blocks, given.anchors)
    splits = len(partial)
    kernels.anchors_backward_kernel[(blocks, splits)](
        given, up, partial, call, tokens, per_split, BT=rows, BC=columns
    )
    columns = max(1, min(_power(anchors, 1) // _REDUCERS, 32))
    grid, together = (triton.cdiv(anchors, columns),), _at_once(splits, columns * lanes)
    kernels.anchors_reduce_kernel[grid](
        given, grads, partial, call, splits, BC=columns, BS=together
    )


def _project_backward(given: Tensors, up: Tensors, grads: Tensors, call: Call) -> None:
    assert given.weight is not None
    sizes = sizes_of(given)
    tokens, hidden, lanes = sizes.tokens, sizes.hidden, _lanes(sizes.rank)
    width, rows = min(_power(hidden, 16), 64 if lanes >= 16 else 256), 16
    blocks = triton.cdiv(hidden, width)
    partial, per_split = _partial_sums(tokens, rows, blocks, given.weight)
    splits = len(partial)
    kernels.project_backward_kernel[(blocks, splits)](
        given, up, grads, partial, call, tokens, per_split, BT=rows, BD=width
    )
    width = max(1, min(_power(hidden, 1) // _REDUCERS, 32))
    grid, together = (triton.cdiv(hidden, width),), _at_once(splits, width * lanes)
    kernels.project_reduce_kernel[grid](given, grads, partial, call, splits, BD=width, BS=together)


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
