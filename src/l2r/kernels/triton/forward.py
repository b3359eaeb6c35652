"""Triton forward: one kernel with three stages, any run of neighboring stages in one launch.

project: x -> q (RMS statistic and projection from one read of x). score: q -> logits (anchor
scores, log-sum-exp over the anchors of an expert). select: logits -> log-sum-exp over experts,
top-k, weights. A launch that holds all three reads x and the parameters and writes the results;
nothing of size T x N x H exists.
"""

# mypy: disable-error-code="no-untyped-def,misc,no-untyped-call"

from typing import no_type_check

import triton
import triton.language as tl

from l2r.kernels.triton.blocks import load_anchors, load_block, product, query_side, store_block


@triton.jit
@no_type_check
def project_block(
    x_ptr,
    weight_ptr,
    gain_ptr,
    rows,
    T,
    D,
    norm_eps,
    R: tl.constexpr,
    RP: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Query block [BT, RP] and rstd [BT]: the gain multiplies W_q, rstd the finished sums."""
    lane = tl.arange(0, RP)
    query = tl.zeros([BT, RP], tl.float32)
    square = tl.zeros([BT], tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        x = load_block(x_ptr, rows, d, T, D)
        if gain_ptr is not None:
            square += tl.sum(x * x, 1)
            gain = tl.load(gain_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        if RP >= 16:
            w = load_block(weight_ptr, lane, d, R, D)
            if gain_ptr is not None:
                w = w * gain[None, :]
            query += product(x, w, R, BD)
        else:
            for r in tl.static_range(R):
                w = tl.load(weight_ptr + r * D + d, mask=d < D, other=0.0).to(tl.float32)
                if gain_ptr is not None:
                    w = w * gain
                part = tl.sum(x * w[None, :], 1)
                query += tl.where(lane[None, :] == r, part[:, None], 0.0)
    rstd = tl.full([BT], 1.0, tl.float32)
    if gain_ptr is not None:
        rstd = tl.rsqrt(square / D + norm_eps)
        query = query * rstd[:, None]
    return query, rstd


@triton.jit
@no_type_check
def score_block(
    scaled,
    anchors_ptr,
    experts,
    N,
    eps,
    p,
    SCORING: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
):
    """Logits of a block of experts [BT, BN]: running log-sum-exp over anchors, one exp each.

    The factor of b comes after the product: b itself would take twice the shared memory.
    """
    keys, factor = load_anchors(anchors_ptr, experts * H, N * H, eps, p, SCORING, R, RP)
    top = product(scaled, keys, R, RP) * factor[None, :]
    if H > 1:
        total = tl.full(top.shape, 1.0, tl.float32)
        for h in range(1, H):
            keys, factor = load_anchors(anchors_ptr, experts * H + h, N * H, eps, p, SCORING, R, RP)
            score = product(scaled, keys, R, RP) * factor[None, :]
            gap = score - top
            small = tl.exp(-tl.abs(gap))
            total = tl.where(gap > 0, total * small + 1, total + small)
            top = tl.maximum(top, score)
        top += tl.log(total)
    return top


@triton.jit
@no_type_check
def take_best(logits, free, experts, N):
    """Largest free logit [BT], its expert (the smallest index among equals), what stays free."""
    best = tl.max(tl.where(free, logits, -float("inf")), 1)
    at_best = free & (logits == best[:, None])
    choice = tl.min(tl.where(at_best, experts[None, :], N - 1), 1)
    return best, choice, free & (experts[None, :] != choice[:, None])


@triton.jit
@no_type_check
def select_block(logits, weights_ptr, indices_ptr, rows, experts, T, N, K, NORMALIZE: tl.constexpr):
    """Write the K largest probabilities and their experts; returns the log-sum-exp [BT]."""
    inside = (experts < N)[None, :]
    masked = tl.where(inside, logits, -float("inf"))
    top = tl.max(masked, 1)
    lse = top + tl.log(tl.sum(tl.exp(masked - top[:, None]), 1))
    free = tl.broadcast_to(inside, logits.shape)
    row = rows * K
    chosen_sum = tl.zeros(rows.shape, tl.float32)
    for k in range(K):
        best, choice, free = take_best(logits, free, experts, N)
        weight = tl.exp(best - lse)
        chosen_sum += weight
        tl.store(indices_ptr + row + k, choice.to(tl.int64), mask=rows < T)
        if not NORMALIZE:
            tl.store(weights_ptr + row + k, weight, mask=rows < T)
    if NORMALIZE:
        free = tl.broadcast_to(inside, logits.shape)
        for k in range(K):
            best, choice, free = take_best(logits, free, experts, N)
            tl.store(weights_ptr + row + k, tl.exp(best - lse) / chosen_sum, mask=rows < T)
    return lse


@triton.jit(do_not_specialize=["T", "K"])
@no_type_check
def forward_kernel(
    x_ptr,
    weight_ptr,
    gain_ptr,
    anchors_ptr,
    rho_ptr,
    query_ptr,
    logits_ptr,
    rstd_ptr,
    weights_ptr,
    indices_ptr,
    lse_ptr,
    T,
    D,
    N,
    K,
    gamma,
    beta,
    p,
    eps,
    scale,
    norm_eps,
    NORMALIZE: tl.constexpr,
    SCORING: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
):
    """Stages of a block of BT tokens (grid axis 0) and BN experts (axis 1)."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    experts = tl.program_id(1) * BN + tl.arange(0, BN)
    lane = tl.arange(0, RP)
    if x_ptr is not None:
        query, rstd = project_block(
            x_ptr, weight_ptr, gain_ptr, rows, T, D, norm_eps, R, RP, BT, BD
        )
        store_block(query_ptr, query, rows, lane, T, R)
        if gain_ptr is not None:
            tl.store(rstd_ptr + rows, rstd, mask=rows < T)
    elif anchors_ptr is not None:
        query = load_block(query_ptr, rows, lane, T, R)
    if anchors_ptr is not None:
        scaled, _, _, _ = query_side(query, rho_ptr, rows, T, gamma, beta, eps, SCORING)
        logits = score_block(scaled, anchors_ptr, experts, N, eps, p, SCORING, H, R, RP) * scale
        logits = logits.to(logits_ptr.dtype.element_ty)
        store_block(logits_ptr, logits, rows, experts, T, N)
        logits = logits.to(tl.float32)
    elif weights_ptr is not None:
        logits = load_block(logits_ptr, rows, experts, T, N)
    if weights_ptr is not None:
        lse = select_block(logits, weights_ptr, indices_ptr, rows, experts, T, N, K, NORMALIZE)
        tl.store(lse_ptr + rows, lse, mask=rows < T)
