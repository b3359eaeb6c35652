"""Gradients by plain code, where the fused backward is not enough.

Gradient penalties, Hessian-vector products and meta-learning differentiate a gradient
(``create_graph``); the fused backward has no derivative, and autograd would leave out what is
behind it without an error. Batched gradients (``jacobian(vectorize=True)``) have no address that a
kernel could read.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from l2r.functional.selection import softmax_weights
from l2r.kernels import plain
from l2r.kernels.contract import INPUTS, Options, Tensors


def plain_grads(
    tensors: Tensors, up: Tensors, options: Options, needed: Iterable[bool]
) -> list[Tensor | None]:
    """Recompute a call by plain code, with the same chosen experts, and differentiate it.

    ``tensors``: inputs and results of the call; ``up``: gradients of its logits and weights;
    ``needed``: which inputs need a gradient. The gradients are in the order of the inputs.
    """
    with torch.enable_grad():
        # One input may be made of another: gradients stop at a view of each.
        given = Tensors(*[None if tensor is None else tensor.view_as(tensor) for tensor in tensors])
        results = _recomputed(given, options)
        pairs = [
            (result.to(grad.dtype), grad)
            for result, grad in zip(results, (up.logits, up.weights), strict=True)
            if result is not None and grad is not None
        ]
        outputs, upstream = zip(*pairs, strict=True)
        flags = list(needed)
        inputs = zip(given[:INPUTS], flags, strict=True)
        wanted = [tensor for tensor, need in inputs if need and tensor is not None]
        grads = torch.autograd.grad(outputs, wanted, upstream, create_graph=True, allow_unused=True)
    in_order = iter(grads)
    return [next(in_order) if need else None for need in flags]


def _recomputed(t: Tensors, options: Options) -> tuple[Tensor, Tensor | None]:
    """Logits and weights of a call, made of its inputs by plain code."""
    logits, weights = t.logits, None
    if t.x is not None:
        assert t.weight is not None and t.anchors is not None
        logits = plain.route_logits(t.x, (t.weight, t.gain, t.anchors), options.score)
    assert logits is not None
    if options.top_k:
        assert t.indices is not None
        weights = softmax_weights(logits, t.indices, normalize=options.normalize)
    return logits, weights
