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

from l2r.functional.scoring import ScoreConstants
from l2r.kernels import contract
from l2r.kernels.contract import (
    SCORINGS,
    Options,
    Sizes,
    Tensors,
    empty_grads,
    empty_results,
    first_input,
    sizes_of,
)
from l2r.kernels.triton import backward as kernels
from l2r.kernels.triton.forward import forward_kernel, project_kernel
from l2r.kernels.triton.sizes import (
    anchors_backward_blocks,
    forward_blocks,
    lanes,
    power,
    project_backward_blocks,
    project_blocks,
    query_backward_blocks,
    selects_at_once,
)

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
            RP=fixed(lanes(sizes.rank)),
            NORMALIZE=fixed(options.normalize),
        )


class Sums(NamedTuple):
    """Partial sums over the hidden dimension, in fp32, from which a query is finished.

    products: x W of each part, [parts, T, R]. squares: sum of x^2 of each part, [parts, T].
    """

    products: Tensor | None = None
    squares: Tensor | None = None


def forward(given: Tensors, options: Options) -> Tensors:
    """Compute the results of a call, in few launches; see ``contract.Backend``."""
    sizes = sizes_of(given)
    if options.top_k and given.x is not None and not selects_at_once(sizes):
        done = forward(given._replace(routes=None), options._replace(top_k=0))
        chosen = forward(Tensors(logits=done.logits, routes=given.routes), options)
        return done._replace(
            routes=chosen.routes, weights=chosen.weights, indices=chosen.indices, lse=chosen.lse
        )
    # Everything is always written: kernels compiled for less could round differently.
    done = empty_results(given, options._replace(save=True))
    tokens, experts = sizes.tokens, sizes.experts
    if tokens == 0:
        return done
    call, sums = Call.of(given, options), Sums()
    blocks = forward_blocks(sizes, options.top_k)
    columns = 1 if options.top_k else triton.cdiv(experts, blocks["BN"])
    with torch.cuda.device_of(first_input(given)):  # type: ignore[no-untyped-call]
        if given.x is not None:
            sums = _project(done, call, sizes)
        grid = (triton.cdiv(tokens, blocks["BT"]), columns)
        rest = done._replace(x=None, weight=None, routes=None)
        routes = done.indices if given.routes is None else given.routes
        follows = int(given.routes is not None)
        parts = 0 if sums.products is None else len(sums.products)
        forward_kernel[grid](rest, call, sums, routes, follows, tokens, parts, **blocks)
    return done


def _project(done: Tensors, call: Call, sizes: Sizes) -> Sums:
    """Write the query, or return the sums from which it is finished.

    It is written if one part is all of d and it is fp32. The number of parts does not depend on
    the number of tokens.
    """
    assert done.weight is not None
    blocks, sums, fp32 = project_blocks(sizes), Sums(), torch.float32
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
    """Compute the gradients of what was given, part after part; see ``contract.Backend``.

    ``up`` of a part: the gradients of its results, among them that of the query.
    """
    t, grads, call = tensors, empty_grads(tensors, options), Call.of(tensors, options)
    sizes = sizes_of(tensors)
    with torch.cuda.device_of(first_input(tensors)):  # type: ignore[no-untyped-call]
        if t.x is None:
            _select_backward(t, up, grads, call)
            return grads
        assert t.logits is not None and t.query is not None
        if options.top_k:
            logits = contract.empty(*t.logits.shape, like=t.logits, dtype=torch.float32)
            part = Tensors(logits=t.logits, weights=t.weights, indices=t.indices, lse=t.lse)
            _select_backward(part, up, Tensors(logits=logits), call)
            up = Tensors(logits=logits)
        query = contract.empty(*t.query.shape, like=t.query)
        part = Tensors(anchors=t.anchors, logits=t.logits, query=t.query)
        _score_backward(part, up, Tensors(anchors=grads.anchors, query=query), call, sizes)
        part = Tensors(x=t.x, weight=t.weight, gain=t.gain, query=t.query, rstd=t.rstd)
        _project_backward(part, Tensors(query=query), grads._replace(anchors=None), call, sizes)
    return grads


def _select_backward(given: Tensors, up: Tensors, grads: Tensors, call: Call) -> None:
    tokens, columns = len(first_input(given)), power(call.N, 16)
    rows = max(1, min(2048 // columns, 16))
    grid = (triton.cdiv(tokens, rows),)
    kernels.select_backward_kernel[grid](given, up, grads, call, tokens, BT=rows, BN=columns)


def _score_backward(given: Tensors, up: Tensors, grads: Tensors, call: Call, sizes: Sizes) -> None:
    assert given.anchors is not None
    tokens, anchors = sizes.tokens, sizes.experts * sizes.heads
    blocks = query_backward_blocks(sizes)
    grid = (triton.cdiv(tokens, blocks["BT"]),)
    kernels.query_backward_kernel[grid](given, up, grads, call, tokens, **blocks)
    blocks = anchors_backward_blocks(sizes)
    columns = triton.cdiv(anchors, blocks["BC"])
    partial, per_split = _partial_sums(tokens, blocks["BT"], columns, given.anchors)
    splits = len(partial)
    kernels.anchors_backward_kernel[(columns, splits)](
        given, up, partial, call, tokens, per_split, **blocks
    )
    width = max(1, min(power(anchors, 1) // _REDUCERS, 32))
    grid, together = (triton.cdiv(anchors, width),), _at_once(splits, width * lanes(sizes.rank))
    kernels.anchors_reduce_kernel[grid](given, grads, partial, call, splits, BC=width, BS=together)


def _project_backward(
    given: Tensors, up: Tensors, grads: Tensors, call: Call, sizes: Sizes
) -> None:
    assert given.weight is not None
    tokens, hidden = sizes.tokens, sizes.hidden
    blocks = project_backward_blocks(sizes)
    columns = triton.cdiv(hidden, blocks["BD"])
    partial, per_split = _partial_sums(tokens, blocks["BT"], columns, given.weight)
    splits = len(partial)
    kernels.project_backward_kernel[(columns, splits)](
        given, up, grads, partial, call, tokens, per_split, **blocks
    )
    width = max(1, min(power(hidden, 1) // _REDUCERS, 32))
    grid, together = (triton.cdiv(hidden, width),), _at_once(splits, width * lanes(sizes.rank))
    kernels.project_reduce_kernel[grid](given, grads, partial, call, splits, BD=width, BS=together)


def _partial_sums(tokens: int, rows: int, blocks: int, like: Tensor) -> tuple[Tensor, int]:
    """Room [splits, ...] for sums over parts of the tokens, and tokens per part (whole blocks)."""
    wanted = min(triton.cdiv(_PROGRAMS, blocks), max(1, _PARTIAL_NUMBERS // like.numel()))
    per_split = triton.cdiv(triton.cdiv(tokens, wanted), rows) * rows
    splits = triton.cdiv(tokens, per_split)
    return contract.empty(splits, *like.shape, like=like, dtype=torch.float32), per_split


def _at_once(splits: int, numbers: int) -> int:
    """Partial sums that a reducing program reads at a time; each more costs a trip to memory."""
    return min(power(splits, 1), max(1, 4096 // numbers))
