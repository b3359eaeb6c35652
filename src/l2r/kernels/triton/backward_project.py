"""Triton backward of the projection, with the sums over tokens in two stages as in backward.py."""

# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call"

from typing import no_type_check

import triton
import triton.language as tl

from l2r.kernels.triton.blocks import load_block, product, store_block, sum_block, weighted_sum


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
