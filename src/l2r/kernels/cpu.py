"""CPU backend: compiled code for fp32 parameters, blocks of torch operations for the rest.

Compiled code reads hidden states in fp32 or bf16; other dtypes are copied to fp32 for it.

Shape letters: T tokens, R rank, N experts, H anchors.
"""

from struct import Struct

import torch
from torch import Tensor

from l2r.functional.scoring import ScoreConstants
from l2r.kernels import cpu_blocks as blocks
from l2r.kernels.checks import check_routes
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
from l2r.kernels.native.build import library
from l2r.kernels.plain import KernelWeights, Routed

# The structures of router.h in bytes, which ctypes passes as their address: half the time of
# ctypes' own structures. Call: sizes, score, threads and whether to normalize, tensors.
_call = Struct(f"7q i6f 2i {len(Tensors._fields)}P").pack
_pointers = Struct(f"{len(Tensors._fields)}P").pack
_FP32 = torch.float32
_WRONG_ROUTE = 2  # what the compiled code returns for a route to no expert, or to one twice
_MAX_RANK = 64  # above, the products of torch are faster
_MAX_ANCHOR_NUMBERS = 2**18  # N H R up to which a gradient per thread stays in the caches


def forward(given: Tensors, options: Options) -> Tensors:
    """Compute the results of a call; see ``contract.Backend``."""
    sizes = sizes_of(given)
    if _compiled(given, sizes):
        done = empty_results(given, options)
        _run("l2r_forward", sizes, options, _readable(done))
        return done
    if given.x is None:
        return blocks.select(given, options)
    done = blocks.route_logits(given, options.score)
    if not options.top_k:
        return done
    chosen = forward(Tensors(logits=done.logits, routes=given.routes), options)
    return done._replace(weights=chosen.weights, indices=chosen.indices, lse=chosen.lse)


def infer(
    x: Tensor,
    weights: KernelWeights,
    score: ScoreConstants,
    top_k: int,
    normalize: bool,
    routes: Tensor | None,
) -> Routed | None:
    """Run a whole router in compiled code, without results for a backward; None for other tensors.

    The same as ``forward`` with the checks before it, written out for the call of a decoding step.
    """
    kernels = library()
    weight, gain, anchors = weights
    if kernels is None or x.dim() != 2 or anchors.dim() != 3:
        return None
    (tokens, hidden), (experts, heads, rank) = x.shape, anchors.shape
    is_bf16 = x.dtype is torch.bfloat16
    fit = (
        weight.shape == (rank, hidden)
        and rank <= _MAX_RANK
        and 1 <= top_k <= experts
        and (is_bf16 or x.dtype is _FP32)
        and weight.dtype is _FP32
        and anchors.dtype is _FP32
        and x.is_cpu
        and weight.is_cpu
        and anchors.is_cpu
        and x.is_contiguous()
        and weight.is_contiguous()
        and anchors.is_contiguous()
        and (
            gain is None
            or (
                gain.shape == (hidden,)
                and gain.dtype is _FP32
                and gain.is_cpu
                and gain.is_contiguous()
            )
        )
        and (
            routes is None
            or (
                routes.shape == (tokens, top_k)
                and routes.dtype is torch.int64
                and routes.is_cpu
                and routes.is_contiguous()
            )
        )
    )
    if not fit:
        return None
    at_x, at_weight, at_anchors = x.data_ptr(), weight.data_ptr(), anchors.data_ptr()
    at_gain = 0 if gain is None else gain.data_ptr()
    if not (at_x and at_weight and at_anchors and (at_gain or gain is None)):
        return None
    logits = anchors.new_empty(tokens, experts)
    chosen = anchors.new_empty(tokens, top_k)
    indices = anchors.new_empty(tokens, top_k, dtype=torch.int64)
    at_routes = 0 if routes is None else routes.data_ptr()
    call = _call(
        *(tokens, hidden, rank, experts, heads, top_k, is_bf16, SCORINGS[score[0]], *score[1:]),
        1 if tokens == 1 else _threads(Sizes(tokens, hidden, rank, experts, heads)),
        normalize,
        *(at_x, at_weight, at_gain, at_anchors, at_routes),
        *(logits.data_ptr(), 0, 0, chosen.data_ptr(), indices.data_ptr(), 0),
    )
    failure = kernels.l2r_forward(call)
    if failure:
        raise _failed(failure, (tokens, hidden, rank, experts, heads), routes)
    return logits, chosen, indices


def _failed(code: int, sizes: tuple[int, ...], routes: Tensor | None) -> Exception:
    """Return the error for what the compiled code returned."""
    if code == _WRONG_ROUTE and routes is not None:
        check_routes(routes, sizes[3])
    return MemoryError(f"the router's kernel ran out of memory for T D R N H {list(sizes)}")


def backward(tensors: Tensors, up: Tensors, options: Options) -> Tensors:
    """Compute the gradients of what was given; see ``contract.Backend``."""
    anchors, sizes = tensors.anchors, sizes_of(tensors)
    few = anchors is None or anchors.numel() <= _MAX_ANCHOR_NUMBERS
    if few and _compiled(tensors, sizes):
        readable = _readable(tensors)
        grads = empty_grads(readable, options)
        _run("l2r_backward", sizes, options, readable, up, grads)
        if grads.x is None or tensors.x is None:
            return grads
        return grads._replace(x=grads.x.to(tensors.x.dtype))
    t = tensors
    if t.x is None:
        return Tensors(logits=blocks.select_backward(t, up, normalize=options.normalize))
    grad = up.logits
    if options.top_k:
        selection = Tensors(logits=t.logits, weights=t.weights, indices=t.indices, lse=t.lse)
        grad = backward(selection, up, options).logits
    assert grad is not None
    return blocks.route_logits_backward(t, grad, options)


def _compiled(tensors: Tensors, sizes: Sizes) -> bool:
    """Tell whether the compiled code takes these tensors and beats torch's products."""
    t = tensors
    for tensor in (t.weight, t.anchors, t.logits):
        if tensor is not None and tensor.dtype is not torch.float32:
            return False
    is_small = sizes.rank <= _MAX_RANK or sizes.tokens <= blocks.FEW_TOKENS
    if sizes.tokens == 0 or not is_small:
        return False
    return first_input(tensors).is_cpu and library() is not None


def _readable(tensors: Tensors) -> Tensors:
    """Return the tensors with x in a dtype that the compiled code reads."""
    x = tensors.x
    # Checked first: a new tuple would add two microseconds to a decoding step.
    if x is None or x.dtype is torch.float32 or x.dtype is torch.bfloat16:
        return tensors
    return tensors._replace(x=x.float())


def _run(name: str, sizes: Sizes, options: Options, *tensors: Tensors) -> None:
    """Call the compiled code: one pass over the tokens."""
    kernels = library()
    assert kernels is not None  # see _compiled
    x = tensors[0].x
    places = [
        [0 if t is None else t.data_ptr() or _unreadable(t, each) for t in each] for each in tensors
    ]
    call = _call(
        *(*sizes, options.top_k, x is not None and x.dtype is torch.bfloat16),
        *(SCORINGS[options.score[0]], *options.score[1:]),
        *(_threads(sizes), options.normalize),
        *places[0],
    )
    failure = getattr(kernels, name)(call, *[_pointers(*each) for each in places[1:]])
    if failure:
        raise _failed(failure, sizes, tensors[0].routes)


def _unreadable(tensor: Tensor, tensors: Tensors) -> int:
    """Raise ValueError for a freed storage, which the compiled code would take for no tensor."""
    (name,) = [n for n, other in zip(Tensors._fields, tensors, strict=True) if other is tensor]
    raise ValueError(f"{name} must have memory; got a freed storage for {list(tensor.shape)}")


def _threads(sizes: Sizes) -> int:
    """Return the number of threads worth starting: one for every 2**15 numbers."""
    work = sizes.tokens * (sizes.hidden + sizes.experts * max(1, sizes.heads))
    return 1 if work < 2**16 else min(torch.get_num_threads(), sizes.tokens, work // 2**15)
