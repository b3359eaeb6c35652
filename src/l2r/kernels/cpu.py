"""CPU backend: compiled code for fp32 tokens, blocks of torch operations for the rest.

Shape letters: T tokens, R rank, N experts, H anchors.
"""

import torch

from l2r.kernels import cpu_blocks as blocks
from l2r.kernels import native
from l2r.kernels.contract import (
    DEFAULTS,
    Grads,
    Score,
    Tensors,
    Upstream,
    backward_in_stages,
    first_input,
    forward_in_stages,
)

_MAX_RANK = 8  # above, the products of torch are faster
_MAX_ANCHOR_NUMBERS = 2**18  # N H R up to which a gradient per thread stays in the caches


def forward(
    given: Tensors,
    score: Score = DEFAULTS,
    *,
    top_k: int = 0,
    normalize: bool = False,
    save: bool = True,
) -> Tensors:
    """Results of the given stages; see ``contract.Backend``."""
    if _compiled(given):
        return native.forward(given, score, top_k=top_k, normalize=normalize, save=save)
    if (given.x is not None) + (given.anchors is not None) + (top_k > 0) > 1:
        return forward_in_stages(forward, given, score, top_k=top_k, normalize=normalize, save=save)
    return blocks.forward(given, score, top_k=top_k, normalize=normalize, save=save)


def backward(
    tensors: Tensors,
    up: Upstream,
    score: Score = DEFAULTS,
    *,
    normalize: bool = False,
    need_x: bool = False,
) -> Grads:
    """Gradients of what was given; see ``contract.Backend``."""
    x, anchors = tensors.x, tensors.anchors
    if _compiled(tensors) and (anchors is None or anchors.numel() <= _MAX_ANCHOR_NUMBERS):
        return native.backward(tensors, up, score, normalize=normalize, need_x=need_x)
    if (x is not None) + (anchors is not None) + (tensors.weights is not None) > 1:
        return backward_in_stages(backward, tensors, up, score, normalize=normalize, need_x=need_x)
    return blocks.backward(tensors, up, score, normalize=normalize, need_x=need_x)


def _compiled(tensors: Tensors) -> bool:
    """Whether the compiled code takes these tensors and is not slower than torch's products."""
    x, weight, _, anchors, query, _, logits, *_, rho_hat = tensors
    for tensor in (x, weight, anchors, query, logits):
        if tensor is not None and (tensor.dtype is not torch.float32 or not tensor.is_cpu):
            return False  # torch then names the device that is wrong
    tokens, rank = first_input(tensors).shape[0], 0
    if anchors is not None:
        rank = anchors.shape[2]
    elif weight is not None:
        rank = weight.shape[0]
    if rho_hat is not None or tokens == 0 or (rank > _MAX_RANK and tokens > blocks.FEW_TOKENS):
        return False
    return native.library() is not None
