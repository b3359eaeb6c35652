"""Triton backward of selection and scores: every tile of scores is computed again, none is stored.

Sums over tokens are taken in two stages, partial sums per program and one reducing launch, so
that results do not depend on the order in which programs finish. Derivation: README.md.
"""

# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call"

from typing import no_type_check

import triton
import triton.language as tl

from l2r.kernels.triton.blocks import (
    load_anchors,
    load_block,
    product,
    query_side,
    store_block,
    unit_backward,
    weighted_sum,
)


@triton.jit(do_not_specialize=["T"])
@no_type_check
def select_backward_kernel(
    logits_ptr,
    weights_ptr,
    indices_ptr,
    lse_ptr,
    grad_logits_ptr,
    grad_weights_ptr,
    out_ptr,
    T,
    N,
    K,
    NORMALIZE: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    """Gradient of the logits [T, N] from their own and that of everything computed from them."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    ok = rows < T
    experts = tl.arange(0, BN)
    grad = tl.zeros([BT, BN], tl.float32)
    if grad_logits_ptr is not None:
        grad += load_block(grad_logits_ptr, rows, experts, T, N)
    if grad_weights_ptr is not None:
        chosen = tl.zeros([BT, BN], tl.float32)
        total = tl.zeros([BT], tl.float32)
        row = rows * K
        for k in range(K):
            index = tl.load(indices_ptr + row + k, mask=ok, other=0).to(tl.int32)
            weight = tl.load(weights_ptr + row + k, mask=ok, other=0.0)
            part = weight * tl.load(grad_weights_ptr + row + k, mask=ok, other=0.0)
            here = experts[None, :] == index[:, None]
            grad += tl.where(here, part[:, None], 0.0)
            total += part
            if NORMALIZE:
                chosen += tl.where(here, weight[:, None], 0.0)
        if NORMALIZE:
            grad -= chosen * total[:, None]
        else:  # the probabilities pull all logits down
            logits = load_block(logits_ptr, rows, experts, T, N)
            lse = tl.load(lse_ptr + rows, mask=ok, other=0.0)
            grad -= tl.exp(logits - lse[:, None]) * total[:, None]
    store_block(out_ptr, grad, rows, experts, T, N)


@triton.jit
@no_type_check
def score_grads(
    scaled,
    vectors,
    logits_ptr,
    grad_logits_ptr,
    rows,
    cols,
    T,
    N,
    scale,
    H: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
):
    """Gradient S [BT, BC] of the scores of a block, computed again from the logits."""
    grad = scale * load_block(grad_logits_ptr, rows, cols // H, T, N)
    if H > 1:
        logits = load_block(logits_ptr, rows, cols // H, T, N) / scale
        grad = grad * tl.exp(product(scaled, vectors, R, RP) - logits)
    return grad


@triton.jit(do_not_specialize=["T"])
@no_type_check
def query_backward_kernel(
    query_ptr,
    rho_ptr,
    anchors_ptr,
    logits_ptr,
    grad_logits_ptr,
    grad_query_ptr,
    grad_rho_ptr,
    T,
    N,
    gamma,
    beta,
    p,
    eps,
    scale,
    SCORING: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Gradient of the query (and of rho_hat): a block of tokens against all anchors."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    lane = tl.arange(0, RP)
    query = load_block(query_ptr, rows, lane, T, R)
    scaled, inverse, factor, slope = query_side(query, rho_ptr, rows, T, gamma, beta, eps, SCORING)
    grad = tl.zeros([BT, RP], tl.float32)
    for c0 in range(0, N * H, BC):
        cols = c0 + tl.arange(0, BC)
        keys, key_factor = load_anchors(anchors_ptr, cols, N * H, eps, p, SCORING, R, RP)
        vectors = keys * key_factor[:, None]
        weight = score_grads(
            scaled, vectors, logits_ptr, grad_logits_ptr, rows, cols, T, N, scale, H, R, RP
        )
        grad += weighted_sum(weight, vectors, R, RP)
    if SCORING != 0:
        grad_phi = tl.sum(grad * query, 1) * inverse
        grad_rho = grad_phi * slope
        if rho_ptr is not None:
            tl.store(grad_rho_ptr + rows, grad_rho.to(grad_rho_ptr.dtype.element_ty), mask=rows < T)
            grad_rho = grad_rho * 0
        norm = tl.sqrt(tl.sum(query * query, 1))
        grad = unit_backward(grad * factor[:, None], query, norm, inverse, grad_rho, eps)
    store_block(grad_query_ptr, grad, rows, lane, T, R)


@triton.jit(do_not_specialize=["T", "tokens_per_split"])
@no_type_check
def anchors_backward_kernel(
    query_ptr,
    rho_ptr,
    anchors_ptr,
    logits_ptr,
    grad_logits_ptr,
    partial_ptr,
    T,
    N,
    tokens_per_split,
    gamma,
    beta,
    p,
    eps,
    scale,
    SCORING: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Partial sums [split, N H, R] of the gradient of the transformed anchors."""
    split = tl.program_id(1)
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    lane = tl.arange(0, RP)
    keys, key_factor = load_anchors(anchors_ptr, cols, N * H, eps, p, SCORING, R, RP)
    vectors = keys * key_factor[:, None]
    grad = tl.zeros([BC, RP], tl.float32)
    end = tl.minimum(T, (split + 1) * tokens_per_split)
    for t0 in range(split * tokens_per_split, end, BT):
        rows = (t0 + tl.arange(0, BT)).to(tl.int64)
        query = load_block(query_ptr, rows, lane, end, R)
        scaled, _, _, _ = query_side(query, rho_ptr, rows, end, gamma, beta, eps, SCORING)
        weight = score_grads(
            scaled, vectors, logits_ptr, grad_logits_ptr, rows, cols, end, N, scale, H, R, RP
        )
        grad += weighted_sum(tl.trans(weight), scaled, R, RP)
    store_block(partial_ptr, grad, split * N * H + cols, lane, (split + 1) * N * H, R)


@triton.jit(do_not_specialize=["splits"])
@no_type_check
def anchors_reduce_kernel(
    partial_ptr,
    anchors_ptr,
    grad_ptr,
    N,
    splits,
    p,
    eps,
    SCORING: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BC: tl.constexpr,
    BS: tl.constexpr,
):
    """Add the partial sums and go back through psi(|k|) k / max(|k|, eps)."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    lane = tl.arange(0, RP)
    ok = (cols < N * H)[:, None] & (lane < R)[None, :]
    at = cols.to(tl.int64)[:, None] * R + lane[None, :]
    grad = tl.zeros([BC, RP], tl.float32)
    for s0 in range(0, splits, BS):
        split = s0 + tl.arange(0, BS)
        there = (split.to(tl.int64) * N * H * R)[:, None, None] + at[None, :, :]
        inside = (split < splits)[:, None, None] & ok[None, :, :]
        grad += tl.sum(tl.load(partial_ptr + there, mask=inside, other=0.0), 0)
    if SCORING != 0:
        keys = load_block(anchors_ptr, cols, lane, N * H, R)
        norm = tl.sqrt(tl.sum(keys * keys, 1))
        inverse = 1 / tl.maximum(norm, eps)
        grad_norm = tl.zeros([BC], tl.float32)
        if SCORING == 2:
            grad_norm = tl.sum(grad * keys, 1) * inverse / p
            grad = grad * (1 + (norm - 1) / p)[:, None]
        grad = unit_backward(grad, keys, norm, inverse, grad_norm, eps)
    store_block(grad_ptr, grad, cols, lane, N * H, R)
