"""Triton backward, stage by stage: every tile of scores is computed again, none is stored.

Sums over tokens are taken in two stages, partial sums per program and one reducing launch, so
that results do not depend on the order in which programs finish. Derivation: README.md.
"""

from typing import no_type_check

import triton
import triton.language as tl

from l2r.kernels.triton.blocks import (
    load_anchors,
    load_block,
    product,
    query_side,
    store_block,
    sum_block,
    unit_backward,
    weighted_sum,
)


@triton.jit(do_not_specialize=["T"])
@no_type_check
def select_backward_kernel(given, up, grads, call, T, BT: tl.constexpr, BN: tl.constexpr):
    """Gradient of the logits [T, N] from their own and that of everything computed from them."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    ok = rows < T
    experts = tl.arange(0, BN)
    grad = tl.zeros([BT, BN], tl.float32)
    if up.logits is not None:
        grad += load_block(up.logits, rows, experts, T, call.N)
    if up.weights is not None:
        chosen = tl.zeros([BT, BN], tl.float32)
        total = tl.zeros([BT], tl.float32)
        row = rows * call.K
        for k in range(call.K):
            index = tl.load(given.indices + row + k, mask=ok, other=0).to(tl.int32)
            weight = tl.load(given.weights + row + k, mask=ok, other=0.0)
            part = weight * tl.load(up.weights + row + k, mask=ok, other=0.0)
            here = experts[None, :] == index[:, None]
            grad += tl.where(here, part[:, None], 0.0)
            total += part
            if call.NORMALIZE:
                chosen += tl.where(here, weight[:, None], 0.0)
        if call.NORMALIZE:
            grad -= chosen * total[:, None]
        else:  # the probabilities pull all logits down
            logits = load_block(given.logits, rows, experts, T, call.N)
            lse = tl.load(given.lse + rows, mask=ok, other=0.0)
            grad -= tl.exp(logits - lse[:, None]) * total[:, None]
    store_block(grads.logits, grad, rows, experts, T, call.N)


@triton.jit
@no_type_check
def score_grads(scaled, vectors, given, up, call, rows, cols, T):
    """Gradient S [BT, BC] of the scores of a block, computed again from the logits."""
    grad = call.score.scale * load_block(up.logits, rows, cols // call.H, T, call.N)
    if call.H > 1:
        logits = load_block(given.logits, rows, cols // call.H, T, call.N) / call.score.scale
        grad = grad * tl.exp(product(scaled, vectors, call.R, call.RP) - logits)
    return grad


@triton.jit(do_not_specialize=["T"])
@no_type_check
def query_backward_kernel(given, up, grads, call, T, BT: tl.constexpr, BC: tl.constexpr):
    """Gradient of the query: a block of tokens against all anchors."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    lane = tl.arange(0, call.RP)
    query = load_block(given.query, rows, lane, T, call.R)
    scaled, inverse, factor, slope = query_side(query, call)
    grad = tl.zeros([BT, call.RP], tl.float32)
    for c0 in range(0, call.N * call.H, BC):
        cols = c0 + tl.arange(0, BC)
        keys, key_factor = load_anchors(given, call, cols)
        vectors = keys * key_factor[:, None]
        weight = score_grads(scaled, vectors, given, up, call, rows, cols, T)
        grad += weighted_sum(weight, vectors, call.R, call.RP)
    if call.score.scoring != 0:
        grad_phi = tl.sum(grad * query, 1) * inverse
        grad_rho = grad_phi * slope
        norm = tl.sqrt(tl.sum(query * query, 1))
        grad = unit_backward(grad * factor[:, None], query, norm, inverse, grad_rho, call.score.eps)
    store_block(grads.query, grad, rows, lane, T, call.R)


@triton.jit(do_not_specialize=["T", "tokens_per_split"])
@no_type_check
def anchors_backward_kernel(
    given, up, partial_ptr, call, T, tokens_per_split, BT: tl.constexpr, BC: tl.constexpr
):
    """Partial sums [split, N H, R] of the gradient of the transformed anchors."""
    split = tl.program_id(1)
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    lane = tl.arange(0, call.RP)
    keys, key_factor = load_anchors(given, call, cols)
    vectors = keys * key_factor[:, None]
    grad = tl.zeros([BC, call.RP], tl.float32)
    end = tl.minimum(T, (split + 1) * tokens_per_split)
    for t0 in range(split * tokens_per_split, end, BT):
        rows = (t0 + tl.arange(0, BT)).to(tl.int64)
        query = load_block(given.query, rows, lane, end, call.R)
        scaled, _, _, _ = query_side(query, call)
        weight = score_grads(scaled, vectors, given, up, call, rows, cols, end)
        grad += weighted_sum(tl.trans(weight), scaled, call.R, call.RP)
    store_block(
        partial_ptr,
        grad,
        split * call.N * call.H + cols,
        lane,
        (split + 1) * call.N * call.H,
        call.R,
    )


@triton.jit(do_not_specialize=["splits"])
@no_type_check
def anchors_reduce_kernel(
    given, grads, partial_ptr, call, splits, BC: tl.constexpr, BS: tl.constexpr
):
    """Add the partial sums and go back through psi(|k|) k / max(|k|, eps)."""
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    lane = tl.arange(0, call.RP)
    grad = sum_block(partial_ptr, cols, lane, call.N * call.H, call.R, splits, BS)
    if call.score.scoring != 0:
        keys = load_block(given.anchors, cols, lane, call.N * call.H, call.R)
        norm = tl.sqrt(tl.sum(keys * keys, 1))
        inverse = 1 / tl.maximum(norm, call.score.eps)
        grad_norm = tl.zeros([BC], tl.float32)
        if call.score.scoring == 2:
            grad_norm = tl.sum(grad * keys, 1) * inverse / call.score.p
            grad = grad * (1 + (norm - 1) / call.score.p)[:, None]
        grad = unit_backward(grad, keys, norm, inverse, grad_norm, call.score.eps)
    store_block(grads.anchors, grad, cols, lane, call.N * call.H, call.R)


@triton.jit(do_not_specialize=["T", "tokens_per_split"])
@no_type_check
def project_backward_kernel(
    given, up, grads, partial_ptr, call, T, tokens_per_split, BT: tl.constexpr, BD: tl.constexpr
):
    """Gradient of x and partial sums [split, R, D] of that of W_q gain, in one read of x."""
    split = tl.program_id(1)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    lane = tl.arange(0, call.RP)
    w = load_block(given.weight, lane, d, call.R, call.D)
    if given.gain is not None:
        w = w * tl.load(given.gain + d, mask=d < call.D, other=0.0).to(tl.float32)[None, :]
    grad_w = tl.zeros([BD, call.RP], tl.float32)
    columns = tl.trans(w)
    end = tl.minimum(T, (split + 1) * tokens_per_split)
    for t0 in range(split * tokens_per_split, end, BT):
        rows = (t0 + tl.arange(0, BT)).to(tl.int64)
        grad = load_block(up.query, rows, lane, end, call.R)
        x = load_block(given.x, rows, d, end, call.D)
        if given.gain is not None:
            rstd = tl.load(given.rstd + rows, mask=rows < end, other=0.0)
            query = load_block(given.query, rows, lane, end, call.R)
            pull = tl.sum(grad * query, 1) * rstd * rstd / call.D
            grad = grad * rstd[:, None]
        if grads.x is not None:
            grad_x = product(grad, columns, call.R, call.RP)
            if given.gain is not None:
                grad_x -= x * pull[:, None]
            store_block(grads.x, grad_x, rows, d, end, call.D)
        grad_w += weighted_sum(tl.trans(x), grad, call.R, call.RP)
    store_block(
        partial_ptr, tl.trans(grad_w), split * call.R + lane, d, (split + 1) * call.R, call.D
    )


@triton.jit(do_not_specialize=["splits"])
@no_type_check
def project_reduce_kernel(
    given, grads, partial_ptr, call, splits, BD: tl.constexpr, BS: tl.constexpr
):
    """Add the partial sums; share them between W_q and the gain."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    lane = tl.arange(0, call.RP)
    grad = sum_block(partial_ptr, lane, d, call.R, call.D, splits, BS)
    if given.gain is not None:
        gain = tl.load(given.gain + d, mask=d < call.D, other=0.0).to(tl.float32)
        grad_gain = tl.sum(grad * load_block(given.weight, lane, d, call.R, call.D), 0)
        tl.store(grads.gain + d, grad_gain.to(grads.gain.dtype.element_ty), mask=d < call.D)
        grad = grad * gain[None, :]
    store_block(grads.weight, grad, lane, d, call.R, call.D)
