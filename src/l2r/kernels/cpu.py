"""CPU backend: compiled code for fp32 parameters, blocks of torch operations for the rest.

Compiled code reads hidden states in fp32 or bf16; other dtypes are copied to fp32 for it.

Shape letters: T tokens, R rank, N experts, H anchors.
"""

from struct import Struct

import torch
from torch import Tensor

from l2r.kernels import cpu_blocks as blocks
from l2r.kernels.contract import (
    SCORINGS,
    Options,
    Sizes,
    Tensors,
    empty,
    empty_grads,
    empty_results,
    first_input,
    sizes_of,
)
from l2r.kernels.cpu_selection import check_routes
from l2r.kernels.native.build import library
from l2r.kernels.stages import backward_in_stages, forward_in_stages, in_one_stage

# The structures of router.h in bytes, which ctypes passes as their address: half the time of
# ctypes' own structures.
_sizes, _score = Struct("7q").pack, Struct("i6f").pack
_pointers = Struct(f"{len(Tensors._fields)}P").pack
_WRONG_ROUTE = 2  # what the compiled code returns for a route to no expert, or to one twice
_MAX_RANK = 64  # above, the products of torch are faster
_MAX_ANCHOR_NUMBERS = 2**18  # N H R up to which a gradient per thread stays in the caches


def forward(given: Tensors, options: Options) -> Tensors:
    """Results of the given stages; see ``contract.Backend``."""
    done = _whole_router(given, options)
    if done is not None:
        return done
    sizes = sizes_of(given)
    if _compiled(given, sizes):
        done = empty_results(given, options)
        _run("l2r_forward", sizes, options, _readable(done))
        return done
    if in_one_stage(given, options):
        return blocks.forward(given, options)
    return forward_in_stages(forward, given, options)


def _whole_router(given: Tensors, options: Options) -> Tensors | None:
    """Run all stages in fp32 without results for a backward; None for any other call.

    The same as ``forward``, written out for the call of a decoding step: 5 microseconds less.
    """
    x, weight, gain, anchors, top_k = (
        given.x,
        given.weight,
        given.gain,
        given.anchors,
        options.top_k,
    )
    kernels = library()
    if kernels is None or options.save or not top_k:
        return None
    if x is None or weight is None or anchors is None:
        return None
    wide = torch.float32
    if not (weight.dtype is wide and anchors.dtype is wide and x.is_cpu):
        return None
    is_bf16 = x.dtype is torch.bfloat16
    if not is_bf16 and x.dtype is not wide:
        x = x.float()
    tokens, hidden = x.shape
    experts, heads, rank = anchors.shape
    sizes = (tokens, hidden, rank, experts, heads)
    inputs = (x.data_ptr(), weight.data_ptr(), gain.data_ptr() if gain is not None else 1)
    keys = anchors.data_ptr()
    if rank > _MAX_RANK or not (tokens and all(inputs) and keys):
        return None
    logits = empty(tokens, experts, like=anchors)
    weights = empty(tokens, top_k, like=logits)
    indices = empty(tokens, top_k, like=logits, dtype=torch.int64)
    routes = given.routes
    scoring, *constants = options.score
    failure = kernels.l2r_forward(
        _sizes(*sizes, top_k, is_bf16),
        _score(SCORINGS[scoring], *constants),
        1 if tokens == 1 else _threads(Sizes(*sizes)),
        options.normalize,
        _pointers(
            *inputs[:2],
            inputs[2] if gain is not None else 0,
            keys,
            *(0, 0, logits.data_ptr(), 0 if routes is None else routes.data_ptr()),
            *(0, weights.data_ptr(), indices.data_ptr(), 0),
        ),
    )
    if failure:
        raise _failed(failure, sizes, routes)
    return Tensors(given.x, weight, gain, anchors, logits=logits, weights=weights, indices=indices)


def _failed(code: int, sizes: tuple[int, ...], routes: Tensor | None) -> Exception:
    """The error for what the compiled code returned."""
    if code == _WRONG_ROUTE and routes is not None:
        check_routes(routes, sizes[3])
    return MemoryError(f"the router's kernel ran out of memory for T D R N H {list(sizes)}")


def backward(tensors: Tensors, up: Tensors, options: Options) -> Tensors:
    """Gradients of what was given; see ``contract.Backend``."""
    anchors, sizes = tensors.anchors, sizes_of(tensors)
    few = anchors is None or anchors.numel() <= _MAX_ANCHOR_NUMBERS
    if few and _compiled(tensors, sizes):
        readable = _readable(tensors)
        grads = empty_grads(readable, options)
        _run("l2r_backward", sizes, options, readable, up, grads)
        if grads.x is None or tensors.x is None:
            return grads
        return grads._replace(x=grads.x.to(tensors.x.dtype))
    if in_one_stage(tensors, options):
        return blocks.backward(tensors, up, options)
    return backward_in_stages(backward, tensors, up, options)


def _compiled(tensors: Tensors, sizes: Sizes) -> bool:
    """Whether the compiled code takes these tensors and is not slower than torch's products."""
    t = tensors
    for tensor in (t.weight, t.anchors, t.query, t.logits):
        if tensor is not None and tensor.dtype is not torch.float32:
            return False
    is_small = sizes.rank <= _MAX_RANK or sizes.tokens <= blocks.FEW_TOKENS
    if t.rho_hat is not None or sizes.tokens == 0 or not is_small:
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
    scoring, *constants = options.score
    x = tensors[0].x
    failure = getattr(kernels, name)(
        _sizes(*sizes, options.top_k, x is not None and x.dtype is torch.bfloat16),
        _score(SCORINGS[scoring], *constants),
        _threads(sizes),
        options.normalize,
        *[
            _pointers(*[0 if t is None else t.data_ptr() or _unreadable(t, each) for t in each])
            for each in tensors
        ],
    )
    if failure:
        raise _failed(failure, sizes, tensors[0].routes)


def _unreadable(tensor: Tensor, tensors: Tensors) -> int:
    """Raise ValueError for a freed storage, which the compiled code would take for no tensor."""
    (name,) = [n for n, other in zip(Tensors._fields, tensors, strict=True) if other is tensor]
    raise ValueError(f"{name} must have memory; got a freed storage for {list(tensor.shape)}")


def _threads(sizes: Sizes) -> int:
    """Number of threads worth starting: one for every 2**15 numbers."""
    work = sizes.tokens * (sizes.hidden + sizes.experts * max(1, sizes.heads))
    return 1 if work < 2**16 else min(torch.get_num_threads(), sizes.tokens, work // 2**15)
