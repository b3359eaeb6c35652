"""Triton backward: every tile of scores is computed again from q and the anchors, none is stored.

Sums over tokens are taken in two stages, partial sums per program and one reducing launch, so
that results do not depend on the order in which programs finish. Derivation: README.md.
"""

# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call"

from typing import no_type_check

import triton
import triton.language as tl

from l2r.kernels.triton_blocks import (
    load_anchors,
    product,
    query_terms,
    unit_backward,
    weighted_sum,
)


@triton.jit(do_not_specialize=["T"])
@no_type_check
def select_backward_kernel(
    logits_ptr,
    lse_ptr,
    indices_ptr,
    weights_ptr,
    grad_logits_ptr,
    grad_weights_ptr,
    grad_lse_ptr,
    grad_share_ptr,
    out_ptr,
    T,
    N,
    K,
    HAS_LOGITS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_SHARE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    """Gradient of the logits [T, N] from those of everything that was made of them."""
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    ok = rows < T
    experts = tl.arange(0, BN)
    at = rows.to(tl.int64)[:, None] * N + experts[None, :]
    inside = ok[:, None] & (experts < N)[None, :]
    logits = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + rows, mask=ok, other=0.0)
    probs = tl.where(inside, tl.exp(logits - lse[:, None]), 0.0)
    grad = tl.zeros([BT, BN], tl.float32)
    through = tl.zeros([BT], tl.float32)  # factor of probs: what pulls all logits down
    if HAS_LOGITS:
        grad += tl.load(grad_logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_LSE:
        through += tl.load(grad_lse_ptr + rows, mask=ok, other=0.0)
    if HAS_SHARE:
        grad_share = tl.load(grad_share_ptr + experts, mask=experts < N, other=0.0)
        grad += probs * grad_share[None, :]
        through -= tl.sum(probs * grad_share[None, :], 1)
    if HAS_WEIGHTS:
        chosen = tl.zeros([BT, BN], tl.float32)
        total = tl.zeros([BT], tl.float32)
        row = rows.to(tl.int64) * K
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
        else:
            through -= total
    grad += probs * through[:, None]
    tl.store(out_ptr + at, grad, mask=inside)


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
    HAS_RHO: tl.constexpr,
    SCORING: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    DOT: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Gradient of the query (and of rho_hat): a block of tokens against all anchors."""
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    ok = rows < T
    lane = tl.arange(0, RP)
    query_at = rows.to(tl.int64)[:, None] * R + lane[None, :]
    query_ok = ok[:, None] & (lane < R)[None, :]
    query = tl.load(query_ptr + query_at, mask=query_ok, other=0.0).to(tl.float32)
    inverse, factor, slope = query_terms(
        query, rho_ptr, rows, ok, gamma, beta, eps, SCORING, HAS_RHO
    )
    scaled = query * (inverse * factor)[:, None]
    row = rows.to(tl.int64)[:, None] * N
    grad = tl.zeros([BT, RP], tl.float32)
    for c0 in range(0, N * H, BC):
        cols = c0 + tl.arange(0, BC)
        cols_ok = cols < N * H
        keys, key_factor = load_anchors(anchors_ptr, cols, cols_ok, eps, p, SCORING, R, RP)
        vectors = keys * key_factor[:, None]
        inside = ok[:, None] & cols_ok[None, :]
        at = row + (cols // H)[None, :]
        weight = scale * tl.load(grad_logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if H > 1:
            logits = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32) / scale
            weight = weight * tl.exp(product(scaled, vectors, R, RP, DOT) - logits)
        grad += weighted_sum(tl.where(inside, weight, 0.0), vectors, R, RP, DOT)
    if SCORING != 0:
        grad_phi = tl.sum(grad * query, 1) * inverse
        grad_rho = grad_phi * slope
        if HAS_RHO:
            tl.store(grad_rho_ptr + rows, grad_rho.to(grad_rho_ptr.dtype.element_ty), mask=ok)
            grad_rho = grad_rho * 0
        norm = tl.sqrt(tl.sum(query * query, 1))
        grad = unit_backward(grad * factor[:, None], query, norm, inverse, grad_rho, eps)
    tl.store(grad_query_ptr + query_at, grad.to(grad_query_ptr.dtype.element_ty), mask=query_ok)


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
    HAS_RHO: tl.constexpr,
    SCORING: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    DOT: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Partial sums [split, N H, R] of the gradient of the transformed anchors."""
    split = tl.program_id(1)
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    cols_ok = cols < N * H
    lane = tl.arange(0, RP)
    keys, key_factor = load_anchors(anchors_ptr, cols, cols_ok, eps, p, SCORING, R, RP)
    vectors = keys * key_factor[:, None]
    grad = tl.zeros([BC, RP], tl.float32)
    end = tl.minimum(T, (split + 1) * tokens_per_split)
    for t0 in range(split * tokens_per_split, end, BT):
        rows = t0 + tl.arange(0, BT)
        ok = rows < end
        query_at = rows.to(tl.int64)[:, None] * R + lane[None, :]
        query_ok = ok[:, None] & (lane < R)[None, :]
        query = tl.load(query_ptr + query_at, mask=query_ok, other=0.0).to(tl.float32)
        inverse, factor, _ = query_terms(
            query, rho_ptr, rows, ok, gamma, beta, eps, SCORING, HAS_RHO
        )
        scaled = query * (inverse * factor)[:, None]
        inside = ok[:, None] & cols_ok[None, :]
        at = rows.to(tl.int64)[:, None] * N + (cols // H)[None, :]
        weight = scale * tl.load(grad_logits_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if H > 1:
            logits = tl.load(logits_ptr + at, mask=inside, other=0.0).to(tl.float32) / scale
            weight = weight * tl.exp(product(scaled, vectors, R, RP, DOT) - logits)
        weight = tl.where(inside, weight, 0.0)
        grad += weighted_sum(tl.trans(weight), scaled, R, RP, DOT)
    at = (split.to(tl.int64) * N * H + cols)[:, None] * R + lane[None, :]
    tl.store(partial_ptr + at, grad, mask=cols_ok[:, None] & (lane < R)[None, :])


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
    cols_ok = cols < N * H
    lane = tl.arange(0, RP)
    ok = cols_ok[:, None] & (lane < R)[None, :]
    at = cols.to(tl.int64)[:, None] * R + lane[None, :]
    grad = tl.zeros([BC, RP], tl.float32)
    for s0 in range(0, splits, BS):
        split = s0 + tl.arange(0, BS)
        there = (split.to(tl.int64) * N * H * R)[:, None, None] + at[None, :, :]
        inside = (split < splits)[:, None, None] & ok[None, :, :]
        grad += tl.sum(tl.load(partial_ptr + there, mask=inside, other=0.0), 0)
    if SCORING != 0:
        keys = tl.load(anchors_ptr + at, mask=ok, other=0.0).to(tl.float32)
        norm = tl.sqrt(tl.sum(keys * keys, 1))
        inverse = 1 / tl.maximum(norm, eps)
        grad_norm = tl.zeros([BC], tl.float32)
        if SCORING == 2:
            grad_norm = tl.sum(grad * keys, 1) * inverse / p
            grad = grad * (1 + (norm - 1) / p)[:, None]
        grad = unit_backward(grad, keys, norm, inverse, grad_norm, eps)
    tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=ok)


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
    HAS_GAIN: tl.constexpr,
    HAS_X: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    DOT: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Gradient of x and partial sums [split, R, D] of that of W_q gain, in one read of x."""
    split = tl.program_id(1)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    d_ok = d < D
    lane = tl.arange(0, RP)
    w_ok = (lane < R)[:, None] & d_ok[None, :]
    w = tl.load(weight_ptr + lane[:, None] * D + d[None, :], mask=w_ok, other=0.0).to(tl.float32)
    if HAS_GAIN:
        w = w * tl.load(gain_ptr + d, mask=d_ok, other=0.0).to(tl.float32)[None, :]
    grad_w = tl.zeros([BD, RP], tl.float32)
    columns = tl.trans(w)
    end = tl.minimum(T, (split + 1) * tokens_per_split)
    for t0 in range(split * tokens_per_split, end, BT):
        rows = t0 + tl.arange(0, BT)
        ok = rows < end
        at = rows.to(tl.int64)[:, None] * R + lane[None, :]
        inside = ok[:, None] & (lane < R)[None, :]
        grad = tl.load(grad_query_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x_at = rows.to(tl.int64)[:, None] * D + d[None, :]
        x_ok = ok[:, None] & d_ok[None, :]
        x = tl.load(x_ptr + x_at, mask=x_ok, other=0.0).to(tl.float32)
        if HAS_GAIN:
            rstd = tl.load(rstd_ptr + rows, mask=ok, other=0.0)
            query = tl.load(query_ptr + at, mask=inside, other=0.0).to(tl.float32)
            pull = tl.sum(grad * query, 1) * rstd * rstd / D
            grad = grad * rstd[:, None]
        if HAS_X:
            grad_x = product(grad, columns, R, RP, DOT)
            if HAS_GAIN:
                grad_x -= x * pull[:, None]
            tl.store(grad_x_ptr + x_at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=x_ok)
        grad_w += weighted_sum(tl.trans(x), grad, R, RP, DOT)
    at = (split * R + lane).to(tl.int64)[None, :] * D + d[:, None]
    tl.store(partial_ptr + at, grad_w, mask=(lane < R)[None, :] & d_ok[:, None])


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
    HAS_GAIN: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
):
    """Add the partial sums; share them between W_q and the gain."""
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    ok = d < D
    grad_gain = tl.zeros([BD], tl.float32)
    if HAS_GAIN:
        gain = tl.load(gain_ptr + d, mask=ok, other=0.0).to(tl.float32)
    for r in range(R):
        grad = tl.zeros([BD], tl.float32)
        for s0 in range(0, splits, BS):
            split = s0 + tl.arange(0, BS)
            there = (split * R + r).to(tl.int64)[:, None] * D + d[None, :]
            inside = (split < splits)[:, None] & ok[None, :]
            grad += tl.sum(tl.load(partial_ptr + there, mask=inside, other=0.0), 0)
        if HAS_GAIN:
            w = tl.load(weight_ptr + r * D + d, mask=ok, other=0.0).to(tl.float32)
            grad_gain += grad * w
            grad = grad * gain
        tl.store(grad_weight_ptr + r * D + d, grad.to(grad_weight_ptr.dtype.element_ty), mask=ok)
    if HAS_GAIN:
        tl.store(grad_gain_ptr + d, grad_gain.to(grad_gain_ptr.dtype.element_ty), mask=ok)
