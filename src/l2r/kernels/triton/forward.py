"""Triton forward: two kernels, of which the second takes any run of neighboring stages.

``project_kernel``: x -> sums over parts of d, for the query and the RMS statistic, from one read of
x. ``forward_kernel``: the sums -> q; q -> logits (anchor scores, log-sum-exp over the anchors of an
expert); logits -> log-sum-exp over experts, top-k, weights. Nothing of size T x N x H exists.

Two launches, since the projection needs another grid than the other stages: many programs, each for
a part of the hidden dimension, even for a single token. The width of a part does not depend on the
number of tokens, so the results of a token do not depend on the batch that it is in.
"""

from typing import no_type_check

import triton
import triton.language as tl

from l2r.kernels.triton.blocks import (
    PRECISION,
    load_anchors,
    load_block,
    product,
    query_side,
    store_block,
    sum_block,
)


@triton.jit
@no_type_check
def add_product(query, x, given, call, d, G: tl.constexpr):
    """Add x [BT, BD] times W diag(gain) at d, to [G, BT, RP] from 16 lanes on, else to [BT, RP].

    The products run on the matrix units as a batch of G, each over a share of d: a single product
    with so few rows and columns would leave most warps idle.
    """
    lane = tl.arange(0, call.RP)
    if given.gain is not None:
        gain = tl.load(given.gain + d, mask=d < call.D, other=0.0).to(tl.float32)
    if call.RP >= 16:
        w = load_block(given.weight, lane, d, call.R, call.D)
        if given.gain is not None:
            w = w * gain[None, :]
        width: tl.constexpr = x.shape[1] // G
        left = tl.permute(tl.reshape(x, [x.shape[0], G, width]), (1, 0, 2))
        right = tl.permute(tl.reshape(w, [call.RP, G, width]), (1, 2, 0))
        query = tl.dot(left, right, query, input_precision=PRECISION)
    else:
        for r in tl.static_range(call.R):
            w = tl.load(given.weight + r * call.D + d, mask=d < call.D, other=0.0).to(tl.float32)
            if given.gain is not None:
                w = w * gain
            part = tl.sum(x * w[None, :], 1)
            query += tl.where(lane[None, :] == r, part[:, None], 0.0)
    return query


@triton.jit
@no_type_check
def finished_query(query, square, given, call, rows, T):
    """Query [BT, RP] from finished sums, written with 1 / RMS; rows from T on are not written."""
    if given.gain is not None:
        rstd = tl.rsqrt(square / call.D + call.score.norm_eps)
        query = query * rstd[:, None]
        tl.store(given.rstd + rows, rstd, mask=rows < T)
    store_block(given.query, query, rows, tl.arange(0, call.RP), T, call.R)
    return query


@triton.jit(do_not_specialize=["T"])
@no_type_check
def project_kernel(
    given, call, sums, T, WIDTH: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, G: tl.constexpr
):
    """Compute [part, T, R] of x W and [part, T] of x^2 over WIDTH of d, for a block of tokens.

    Where no sums are given, one part is all of d, and the query is written.
    """
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    part = tl.program_id(1)
    square = tl.zeros([BT], tl.float32)
    if call.RP >= 16:
        query = tl.zeros([G, BT, call.RP], tl.float32)
    else:
        query = tl.zeros([BT, call.RP], tl.float32)
    for d0 in range(part * WIDTH, tl.minimum(call.D, (part + 1) * WIDTH), BD):
        d = d0 + tl.arange(0, BD)
        x = load_block(given.x, rows, d, T, call.D)
        if given.gain is not None:
            square += tl.sum(x * x, 1)
        query = add_product(query, x, given, call, d, G)
    if call.RP >= 16:
        query = tl.sum(query, 0)
    if sums.products is None:
        finished_query(query, square, given, call, rows, T)
    else:
        first = part.to(tl.int64) * T
        lane = tl.arange(0, call.RP)
        store_block(sums.products + first * call.R, query, rows, lane, T, call.R)
        if given.gain is not None:
            tl.store(sums.squares + first + rows, square, mask=rows < T)


@triton.jit
@no_type_check
def summed_query(given, call, sums, rows, T, parts):
    """Query block [BT, RP] from the sums of all parts; one program of each row writes it."""
    query = sum_block(sums.products, rows, tl.arange(0, call.RP), T, call.R, parts, 4)
    square = tl.zeros(rows.shape, tl.float32)
    if given.gain is not None:
        square = tl.sum(sum_block(sums.squares, rows, tl.arange(0, 1), T, 1, parts, 4), 1)
    writes = tl.where(tl.program_id(1) == 0, rows, T)
    return finished_query(query, square, given, call, writes, T)


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
def keys_of(logits, experts, N):
    """Integers [BT, BN] in the order of the logits, among equals from the last expert to the first.

    NaN ranks as -inf. Experts past N get the smallest integer, which is that of no logit.
    """
    # Only NaN differs from itself. Zeros of both signs are equal.
    value = tl.where(logits != logits, -float("inf"), logits)  # noqa: PLR0124
    value = tl.where(value == 0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats are in reverse order
    keys = (bits.to(tl.int64) << 32) | (N - 1 - experts)[None, :].to(tl.int64)
    return tl.where((experts < N)[None, :], keys, -(2**63))


@triton.jit
@no_type_check
def take_best(keys, N):
    """Logit and expert of the largest key [BT], and the keys without it."""
    best = tl.max(keys, 1)
    choice = N - 1 - (best & 0xFFFFFFFF).to(tl.int32)
    bits = (best >> 32).to(tl.int32)
    logit = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return logit, choice, tl.where(keys == best[:, None], -(2**63), keys)


@triton.jit
@no_type_check
def select_block(logits, given, call, routes, follows, rows, experts, T, BK: tl.constexpr):
    """Write the K largest probabilities, or those of given routes; returns the log-sum-exp [BT].

    NaN ranks as -inf, and makes the log-sum-exp and so all weights NaN. Whether routes are given is
    known when the kernel runs, not when it is compiled: two compilations may round differently.
    """
    masked = tl.where((experts < call.N)[None, :], logits, -float("inf"))
    top = tl.max(masked, 1)
    lse = top + tl.log(tl.sum(tl.exp(masked - top[:, None]), 1))
    keys = keys_of(logits, experts, call.N)
    place = tl.arange(0, BK)
    chosen = tl.full([rows.shape[0], BK], -float("inf"), tl.float32)
    indices = tl.zeros([rows.shape[0], BK], tl.int32)
    for k in range(call.K):
        logit, choice, keys = take_best(keys, call.N)
        here = place[None, :] == k
        chosen = tl.where(here, logit[:, None], chosen)
        indices = tl.where(here, choice[:, None], indices)
    if follows != 0:
        fixed = tl.load(routes + rows * call.K, mask=rows < T, other=-1) >= 0
        for k in range(call.K):
            expert = tl.load(routes + rows * call.K + k, mask=rows < T, other=0)
            is_it = experts[None, :] == expert[:, None]
            logit = tl.sum(tl.where(is_it, masked, 0.0), 1)
            here = fixed[:, None] & (place[None, :] == k)
            chosen = tl.where(here, logit[:, None], chosen)
            indices = tl.where(here, expert[:, None].to(tl.int32), indices)
    if call.NORMALIZE:  # of the k logits alone: all k of a route may be unlikely
        weights = tl.exp(chosen - tl.max(chosen, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
    else:
        weights = tl.exp(chosen - lse[:, None])
    store_block(given.indices, indices, rows, place, T, call.K)
    store_block(given.weights, weights, rows, place, T, call.K)
    return lse


@triton.jit(do_not_specialize=["T", "follows"], do_not_specialize_on_alignment=["routes"])
@no_type_check
def forward_kernel(
    given,
    call,
    sums,
    routes,
    follows,
    T,
    parts,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Router, or selection, of a block of BT tokens (grid axis 0) and BN experts (axis 1).

    ``routes`` are read where ``follows`` is not 0.
    """
    rows = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
    experts = tl.program_id(1) * BN + tl.arange(0, BN)
    if sums.products is not None:
        query = summed_query(given, call, sums, rows, T, parts)
    elif given.anchors is not None:
        query = load_block(given.query, rows, tl.arange(0, call.RP), T, call.R)
    if given.anchors is not None:
        scaled, _, _, _ = query_side(query, call)
        logits = score_block(scaled, given, call, experts) * call.score.scale
        logits = logits.to(given.logits.dtype.element_ty)
        store_block(given.logits, logits, rows, experts, T, call.N)
        logits = logits.to(tl.float32)
    elif given.weights is not None:
        logits = load_block(given.logits, rows, experts, T, call.N)
    if given.weights is not None:
        lse = select_block(logits, given, call, routes, follows, rows, experts, T, BK)
        tl.store(given.lse + rows, lse, mask=rows < T)
