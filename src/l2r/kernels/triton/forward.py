"""Triton forward: one kernel with three stages, any run of neighboring stages in one launch.

project: x -> q (RMS statistic and projection from one read of x). score: q -> logits (anchor
scores, log-sum-exp over the anchors of an expert). select: logits -> log-sum-exp over experts,
top-k, weights. A launch that holds all three reads x and the parameters and writes the results;
nothing of size T x N x H exists.
"""

from typing import no_type_check

import triton
import triton.language as tl

from l2r.kernels.triton.blocks import load_anchors, load_block, product, query_side, store_block


@triton.jit
@no_type_check
def project_block(given, call, rows, T, BT: tl.constexpr, BD: tl.constexpr):
    """Query block [BT, RP] and rstd [BT]: the gain multiplies W_q, rstd the finished sums."""
    lane = tl.arange(0, call.RP)
    query = tl.zeros([BT, call.RP], tl.float32)
    square = tl.zeros([BT], tl.float32)
    for d0 in range(0, call.D, BD):
        d = d0 + tl.arange(0, BD)
        x = load_block(given.x, rows, d, T, call.D)
        if given.gain is not None:
            square += tl.sum(x * x, 1)
            gain = tl.load(given.gain + d, mask=d < call.D, other=0.0).to(tl.float32)
        if call.RP >= 16:
            w = load_block(given.weight, lane, d, call.R, call.D)
            if given.gain is not None:
                w = w * gain[None, :]
            query += product(x, w, call.R, BD)
        else:
            for r in tl.static_range(call.R):
                w = tl.load(given.weight + r * call.D + d, mask=d < call.D, other=0.0).to(
                    tl.float32
                )
                if given.gain is not None:
                    w = w * gain
                part = tl.sum(x * w[None, :], 1)
                query += tl.where(lane[None, :] == r, part[:, None], 0.0)
    rstd = tl.full([BT], 1.0, tl.float32)
    if given.gain is not None:
        rstd = tl.rsqrt(square / call.D + call.score.norm_eps)
        query = query * rstd[:, None]
    return query, rstd


@triton.jit
@no_type_check
def score_block(scaled, given, call, experts):
    """Logits of a block of experts [BT, BN]: running log-sum-exp over anchors, one exp each.

    The factor of b comes after the product: b itself would take twice the shared memory.
    """
    keys, factor = load_anchors(given, call, experts * call.H)
    top = product(scaled, keys, call.R, call.RP) * factor[None, :]
    if call.H > 1:
        total = tl.full(top.shape, 1.0, tl.float32)
        for h in range(1, call.H):
            keys, factor = load_anchors(given, call, experts * call.H + h)
            values = product(scaled, keys, call.R, call.RP) * factor[None, :]
            gap = values - top
            small = tl.exp(-tl.abs(gap))
            total = tl.where(gap > 0, total * small + 1, total + small)
            top = tl.maximum(top, values)
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
def take(ranking, free, given, call, rows, experts, k, T):
    """``take_best``, or the logit and the expert of a token's route where it has one."""
    best, choice, free = take_best(ranking, free, experts, call.N)
    if given.routes is not None:
        route = given.routes + rows * call.K
        follows = tl.load(route, mask=rows < T, other=-1) >= 0
        expert = tl.load(route + k, mask=rows < T, other=0).to(tl.int32)
        logit = tl.sum(tl.where(experts[None, :] == expert[:, None], ranking, 0.0), 1)
        best = tl.where(follows, logit, best)
        choice = tl.where(follows, expert, choice)
    return best, choice, free


@triton.jit
@no_type_check
def select_block(logits, given, call, rows, experts, T):
    """Write the K largest probabilities, or those of given routes; returns the log-sum-exp [BT].

    NaN ranks as -inf, and makes the log-sum-exp and so all weights NaN.
    """
    inside = (experts < call.N)[None, :]
    masked = tl.where(inside, logits, -float("inf"))
    top = tl.max(masked, 1)
    lse = top + tl.log(tl.sum(tl.exp(masked - top[:, None]), 1))
    # Only NaN differs from itself.
    ranking = tl.where(logits != logits, -float("inf"), logits)  # noqa: PLR0124
    free = tl.broadcast_to(inside, logits.shape)
    row = rows * call.K
    chosen_sum = tl.zeros(rows.shape, tl.float32)
    for k in range(call.K):
        best, choice, free = take(ranking, free, given, call, rows, experts, k, T)
        weight = tl.exp(best - lse)
        chosen_sum += weight
        tl.store(given.indices + row + k, choice.to(tl.int64), mask=rows < T)
        if not call.NORMALIZE:
            tl.store(given.weights + row + k, weight, mask=rows < T)
    if call.NORMALIZE:
        free = tl.broadcast_to(inside, logits.shape)
        for k in range(call.K):
            best, choice, free = take(ranking, free, given, call, rows, experts, k, T)
            tl.store(given.weights + row + k, tl.exp(best - lse) / chosen_sum, mask=rows < T)
    return lse


@triton.jit(do_not_specialize=["T"])
@no_type_check
def forward_kernel(given, call, T, BT: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    """Stages of a block of BT tokens (grid axis 0) and BN experts (axis 1)."""
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    experts = tl.program_id(1) * BN + tl.arange(0, BN)
    lane = tl.arange(0, call.RP)
    if given.x is not None:
        query, rstd = project_block(given, call, rows, T, BT, BD)
        store_block(given.query, query, rows, lane, T, call.R)
        if given.gain is not None:
            tl.store(given.rstd + rows, rstd, mask=rows < T)
    elif given.anchors is not None:
        query = load_block(given.query, rows, lane, T, call.R)
    if given.anchors is not None:
        scaled, _, _, _ = query_side(query, given, call, rows, T)
        logits = score_block(scaled, given, call, experts) * call.score.scale
        logits = logits.to(given.logits.dtype.element_ty)
        store_block(given.logits, logits, rows, experts, T, call.N)
        logits = logits.to(tl.float32)
    elif given.weights is not None:
        logits = load_block(given.logits, rows, experts, T, call.N)
    if given.weights is not None:
        lse = select_block(logits, given, call, rows, experts, T)
        tl.store(given.lse + rows, lse, mask=rows < T)
