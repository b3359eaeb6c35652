"""CPU backend: compiled code for fp32 tokens, blocks of torch operations for the rest.

Shape letters: T tokens, R rank, N experts, H anchors.
"""

import torch

from l2r.kernels import cpu_blocks as blocks
from l2r.kernels.contract import (
    Options,
    Tensors,
    backward_in_stages,
    forward_in_stages,
    in_one_stage,
    sizes_of,
)
from l2r.kernels.native import call as native
from l2r.kernels.native.build import library

_MAX_RANK = 8  # above, the products of torch are faster
_MAX_ANCHOR_NUMBERS = 2**18  # N H R up to which a gradient per thread stays in the caches


def forward(given: Tensors, options: Options) -> Tensors:
    """Results of the given stages; see ``contract.Backend``."""
    if _compiled(given):
        return native.forward(given, options)
    if in_one_stage(given, options):
        return blocks.forward(given, options)
    return forward_in_stages(forward, given, options)


def backward(tensors: Tensors, up: Tensors, options: Options) -> Tensors:
    """Gradients of what was given; see ``contract.Backend``."""
    anchors = tensors.anchors
    if _compiled(tensors) and (anchors is None or anchors.numel() <= _MAX_ANCHOR_NUMBERS):
        return native.backward(tensors, up, options)
    if in_one_stage(tensors, options):
        return blocks.backward(tensors, up, options)
    return backward_in_stages(backward, tensors, up, options)


def _compiled(tensors: Tensors) -> bool:
    """Whether the compiled code takes these tensors and is not slower than torch's products."""
    x, weight, _, anchors, rho_hat, query, logits, *_ = tensors
    for tensor in (x, weight, anchors, query, logits):
        if tensor is not None and (tensor.dtype is not torch.float32 or not tensor.is_cpu):
            return False  # torch then names the device that is wrong
    tokens, _, rank, *_ = sizes_of(tensors)
    if rho_hat is not None or tokens == 0 or (rank > _MAX_RANK and tokens > blocks.FEW_TOKENS):
        return False
    return library() is not None
