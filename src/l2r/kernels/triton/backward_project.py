"""Triton backward of the projection, with the sums over tokens in two stages as in backward.py."""

# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call"

from typing import no_type_check

import triton
import triton.language as tl

from l2r.kernels.triton.blocks import load_block, product, store_block, weighted_sum


@triton.jit(do_not_specialize=["T", "tokens_per_split"])
@no_type_check
def project_backward_kernel(
    x_ptr,
    weight_ptr,
    gain_ptr,
    query_ptr,
    rstd_ptr,
    grad_query_ptr,
    grad_x_ptr,
    partial_ptr,
    T,
    D,
    tokens_per_split,
    R: tl.constexpr,
    RP: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Gradient of x and partial sums [split, R, D] of that of W_q gain, in one read of x."""
    split = tl.program_id(1)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    lane = tl.arange(0, RP)
    w = load_block(weight_ptr, lane, d, R, D)
    if gain_ptr is not None:
        w = w * tl.load(gain_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    grad_w = tl.zeros([BD, RP], tl.float32)
    columns = tl.trans(w)
    end = tl.minimum(T, (split + 1) * tokens_per_split)
    for t0 in range(split * tokens_per_split, end, BT):
        rows = (t0 + tl.arange(0, BT)).to(tl.int64)
        grad = load_block(grad_query_ptr, rows, lane, end, R)
        x = load_block(x_ptr, rows, d, end, D)
        if gain_ptr is not None:
            rstd = tl.load(rstd_ptr + rows, mask=rows < end, other=0.0)
            query = load_block(query_ptr, rows, lane, end, R)
            pull = tl.sum(grad * query, 1) * rstd * rstd / D
            grad = grad * rstd[:, None]
        if grad_x_ptr is not None:
            grad_x = product(grad, columns, R, RP)
            if gain_ptr is not None:
                grad_x -= x * pull[:, None]
            store_block(grad_x_ptr, grad_x, rows, d, end, D)
        grad_w += weighted_sum(tl.trans(x), grad, R, RP)
    store_block(partial_ptr, tl.trans(grad_w), split * R + lane, d, (split + 1) * R, D)


@triton.jit(do_not_specialize=["splits"])
@no_type_check
def project_reduce_kernel(
    partial_ptr,
    weight_ptr,
    gain_ptr,
    grad_weight_ptr,
    grad_gain_ptr,
    D,
    splits,
    R: tl.constexpr,
    RP: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
):
    """Add the partial sums; share them between W_q and the gain."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    lane = tl.arange(0, RP)
    ok = (lane < R)[:, None] & (d < D)[None, :]
    at = lane[:, None] * D + d[None, :]
    grad = tl.zeros([RP, BD], tl.float32)
    for s0 in range(0, splits, BS):
        split = s0 + tl.arange(0, BS)
        there = (split.to(tl.int64) * R * D)[:, None, None] + at[None, :, :]
        inside = (split < splits)[:, None, None] & ok[None, :, :]
        grad += tl.sum(tl.load(partial_ptr + there, mask=inside, other=0.0), 0)
    if gain_ptr is not None:
        gain = tl.load(gain_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        grad_gain = tl.sum(grad * load_block(weight_ptr, lane, d, R, D), 0)
        tl.store(grad_gain_ptr + d, grad_gain.to(grad_gain_ptr.dtype.element_ty), mask=d < D)
        grad = grad * gain[None, :]
    store_block(grad_weight_ptr, grad, lane, d, R, D)
