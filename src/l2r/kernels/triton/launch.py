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
    Sizes,
    Tensors,
    empty_grads,
    empty_results,
    first_input,
    sizes_of,
)
from l2r.kernels.stages import backward_in_stages, in_one_stage
from l2r.kernels.triton import backward as kernels
from l2r.kernels.triton.forward import forward_kernel, project_kernel

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


class Sums(NamedTuple):
    """Sums over parts of d, fp32: products [parts, T, R] of x and W, squares [parts, T] of x."""

    products: Tensor | None = None
    squares: Tensor | None = None


def forward(given: Tensors, options: Options) -> Tensors:
    """Results of the given stages, in few launches; see ``contract.Backend``."""
    sizes = sizes_of(given)
    if options.top_k and given.anchors is not None and not _selects_at_once(sizes):
        done = forward(given._replace(routes=None), options._replace(top_k=0))
        chosen = forward(Tensors(logits=done.logits, routes=given.routes), options)
        results = {name: getattr(chosen, name) for name in ("routes", "weights", "indices", "lse")}
        return done._replace(**results)
    # Everything is always written: kernels compiled for less could round differently.
    done = empty_results(given, options._replace(save=True))
    tokens, experts = sizes.tokens, sizes.experts
    if tokens == 0:
        return done
    call, sums = Call.of(given, options), Sums()
    blocks = _forward_blocks(sizes, options.top_k)
    columns = 1 if options.top_k else triton.cdiv(max(1, experts), blocks["BN"])
    with torch.cuda.device_of(first_input(given)):  # type: ignore[no-untyped-call]
        if given.x is not None:
            sums = _project(done, call, sizes)
            if given.anchors is None and sums.products is None:
                return done
        grid = (triton.cdiv(tokens, blocks["BT"]), columns)
        rest = done._replace(x=None, weight=None, routes=None)
        routes = done.indices if given.routes is None else given.routes
        follows = int(given.routes is not None)
        parts = 0 if sums.products is None else len(sums.products)
        forward_kernel[grid](rest, call, sums, routes, follows, tokens, parts, **blocks)
    return done


def _project(done: Tensors, call: Call, sizes: Sizes) -> Sums:
    """Write the query, or return sums over parts of d: of several, or where it is not fp32.

    How many there are does not depend on the number of tokens.
    """
    assert done.weight is not None
    blocks, sums, fp32 = _project_blocks(sizes), Sums(), torch.float32
    parts = triton.cdiv(sizes.hidden, blocks["WIDTH"])
    if parts > 1 or done.weight.dtype != fp32:
        room, like = (parts, sizes.tokens), done.weight
        products = contract.empty(*room, sizes.rank, like=like, dtype=fp32)
        sums = Sums(products, None if done.gain is None else contract.empty(*room, like=products))
    grid = (triton.cdiv(sizes.tokens, blocks["BT"]), parts)
    rest = Tensors(x=done.x, weight=done.weight, gain=done.gain, query=done.query, rstd=done.rstd)
    project_kernel[grid](rest, call, sums, sizes.tokens, **blocks)
    return sums


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


# Sizes of launches: the fastest of those tried on an H100 (dev/performance.md). None depends on the
# number of tokens, so neither do a token's numbers.
def _project_blocks(sizes: Sizes) -> dict[str, int]:
    """Parts, blocks of tokens and of d, groups of d, warps."""
    row = _power(sizes.hidden, 16)
    if _lanes(sizes.rank) < 16:
        width = min(row, 2048)
        tokens = max(1, min(8192 // width, 8))
        return {"WIDTH": row, "BT": tokens, "BD": width, "G": 1, "num_warps": 4}
    width = min(row, 64)
    return {"WIDTH": min(row, 512), "BT": 16, "BD": width, "G": width // 16, "num_warps": 2}


def _forward_blocks(sizes: Sizes, top_k: int) -> dict[str, int]:
    """Blocks of tokens, of experts and of choices, warps."""
    row = _power(sizes.experts, 16)
    columns = row if top_k else min(row, 64)
    if _lanes(sizes.rank) >= 16 and sizes.heads:
        tokens, warps = 16, 4 if columns <= 256 else 8
    elif sizes.heads and (columns > 64 or not top_k):
        tokens, warps = max(1, min(2048 // columns, 16)), 4
    else:  # a row within a warp: its largest logit is found without waiting for others
        tokens = max(1, min((256 if sizes.heads else 128) // columns, 16))
        warps = min(16, max(1, columns // 1024))
    return {"BT": tokens, "BN": columns, "BK": _power(top_k, 1), "num_warps": warps}


def _selects_at_once(sizes: Sizes) -> bool:
    """Whether logits and selection of a block fit in one program's registers and shared memory."""
    rank, row = sizes.rank, _power(sizes.experts, 16)
    return row <= 512 if _lanes(rank) < 16 else row * max(16, rank) <= 8192


def _select_backward(given: Tensors, up: Tensors, grads: Tensors, call: Call) -> None:
    tokens, columns = len(first_input(given)), _power(call.N, 16)
    rows = max(1, min(2048 // columns, 16))
    grid = (triton.cdiv(tokens, rows),)
    kernels.select_backward_kernel[grid](given, up, grads, call, tokens, BT=rows, BN=columns)


def _score_backward(given: Tensors, up: Tensors, grads: Tensors, call: Call) -> None:
    assert given.anchors is not None
    sizes = sizes_of(given)
    tokens, anchors, lanes = sizes.tokens, sizes.experts * sizes.heads, _lanes(sizes.rank)
    blocks = _query_backward_blocks(sizes)
    grid = (triton.cdiv(tokens, blocks["BT"]),)
    kernels.query_backward_kernel[grid](given, up, grads, call, tokens, **blocks)
    blocks = _anchors_backward_blocks(sizes)
    columns = triton.cdiv(anchors, blocks["BC"])
    partial, per_split = _partial_sums(tokens, blocks["BT"], columns, given.anchors)
    splits = len(partial)
    kernels.anchors_backward_kernel[(columns, splits)](
        given, up, partial, call, tokens, per_split, **blocks
    )
    width = max(1, min(_power(anchors, 1) // _REDUCERS, 32))
    grid, together = (triton.cdiv(anchors, width),), _at_once(splits, width * lanes)
    kernels.anchors_reduce_kernel[grid](given, grads, partial, call, splits, BC=width, BS=together)


def _query_backward_blocks(sizes: Sizes) -> dict[str, int]:
    """Blocks of tokens and of anchors, warps."""
    tokens, most = (16, 32) if _lanes(sizes.rank) >= 16 else (4, 256)
    return {"BT": tokens, "BC": min(_power(sizes.experts * sizes.heads, 16), most), "num_warps": 2}


def _anchors_backward_blocks(sizes: Sizes) -> dict[str, int]:
    """Blocks of tokens and of anchors."""
    return {"BT": 16, "BC": min(_power(sizes.experts * sizes.heads, 16), 64)}


def _project_backward(given: Tensors, up: Tensors, grads: Tensors, call: Call) -> None:
    assert given.weight is not None
    sizes = sizes_of(given)
    tokens, hidden, lanes = sizes.tokens, sizes.hidden, _lanes(sizes.rank)
    blocks = _project_backward_blocks(sizes)
    columns = triton.cdiv(hidden, blocks["BD"])
    partial, per_split = _partial_sums(tokens, blocks["BT"], columns, given.weight)
    splits = len(partial)
    kernels.project_backward_kernel[(columns, splits)](
        given, up, grads, partial, call, tokens, per_split, **blocks
    )
    width = max(1, min(_power(hidden, 1) // _REDUCERS, 32))
    grid, together = (triton.cdiv(hidden, width),), _at_once(splits, width * lanes)
    kernels.project_reduce_kernel[grid](given, grads, partial, call, splits, BD=width, BS=together)


def _project_backward_blocks(sizes: Sizes) -> dict[str, int]:
    """Blocks of tokens and of d, warps."""
    row = _power(sizes.hidden, 16)
    if _lanes(sizes.rank) < 16:
        width = min(row, 1024)
        return {"BT": min(16, 4096 // width), "BD": width}
    return {"BT": 32, "BD": min(row, 64), "num_warps": 2}


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
