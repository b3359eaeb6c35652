"""Launches of the backward kernels; see ``triton_launch`` for the rules."""

import torch
import triton
from torch import Tensor

from l2r.kernels import triton_backward as backward
from l2r.kernels import triton_launch as forward
from l2r.kernels.backend import Saved, Score, Selected, Upstream, route_backward_in_parts
from l2r.kernels.triton_sizes import SCORINGS, Rank, on_device, power

PROGRAMS = 512  # programs wanted for a sum over tokens: about four per multiprocessor
PARTIAL_NUMBERS = 2**21  # most numbers that the partial sums of one launch hold


def select_backward(logits: Tensor, selected: Selected, up: Upstream, *, normalize: bool) -> Tensor:
    """Gradient of the logits [T, N], fp32."""
    tokens, experts = logits.shape
    out = forward.empty(tokens, experts, like=logits, dtype=torch.float32)
    if tokens == 0:
        return out
    columns = power(experts, 16)
    rows = max(1, min(2048 // columns, 16))
    with on_device(logits):
        backward.select_backward_kernel[(triton.cdiv(tokens, rows),)](
            logits,
            selected.lse,
            selected.indices,
            selected.weights,
            up.logits,
            up.weights,
            up.lse,
            up.share,
            out,
            tokens,
            experts,
            selected.weights.shape[1],
            HAS_LOGITS=up.logits is not None,
            HAS_WEIGHTS=up.weights is not None,
            HAS_LSE=up.lse is not None,
            HAS_SHARE=up.share is not None,
            NORMALIZE=normalize,
            BT=rows,
            BN=columns,
            num_warps=4,
        )
    return out


def score_backward(
    grad_logits: Tensor,
    query: Tensor,
    anchors: Tensor,
    rho: Tensor | None,
    logits: Tensor,
    constants: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, anchors and rho_hat (empty without one)."""
    tokens, rank = query.shape
    experts, heads, _ = anchors.shape
    grad_query = forward.empty(tokens, rank, like=query)
    grad_rho = forward.empty(0 if rho is None else tokens, like=query)
    if tokens == 0:
        return grad_query, torch.zeros_like(anchors), grad_rho
    sizes = Rank.of(rank)
    shared = {
        "HAS_RHO": rho is not None,
        "SCORING": SCORINGS[constants.scoring],
        "H": heads,
        "R": rank,
        "RP": sizes.padded,
        "DOT": sizes.dot,
        "num_warps": 4,
    }
    floats = constants[1:]
    columns = min(power(experts * heads, 16), 64 if sizes.dot else 256)
    rows = 16 if sizes.dot else 8
    with on_device(query):
        backward.query_backward_kernel[(triton.cdiv(tokens, rows),)](
            query,
            rho,
            anchors,
            logits,
            grad_logits,
            grad_query,
            grad_rho,
            tokens,
            experts,
            *floats,
            **shared,
            BT=rows,
            BC=columns,
        )
        columns, rows = min(columns, 64), 32
        blocks = triton.cdiv(experts * heads, columns)
        splits, per_split = _splits(tokens, rows, blocks, anchors.numel())
        partial = forward.empty(splits, *anchors.shape, like=anchors, dtype=torch.float32)
        backward.anchors_backward_kernel[(blocks, splits)](
            query,
            rho,
            anchors,
            logits,
            grad_logits,
            partial,
            tokens,
            experts,
            per_split,
            *floats,
            **shared,
            BT=rows,
            BC=columns,
        )
        grad_anchors = forward.empty(*anchors.shape, like=anchors)
        columns = min(power(experts * heads, 16), 32)
        backward.anchors_reduce_kernel[(triton.cdiv(experts * heads, columns),)](
            partial,
            anchors,
            grad_anchors,
            experts,
            splits,
            constants.p,
            constants.eps,
            SCORING=shared["SCORING"],
            H=heads,
            R=rank,
            RP=sizes.padded,
            BC=columns,
            BS=min(power(splits, 1), max(1, 4096 // (columns * sizes.padded))),
            num_warps=4,
        )
    return grad_query, grad_anchors, grad_rho


def project_backward(
    grad_query: Tensor,
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    query: Tensor,
    rstd: Tensor,
    *,
    need_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (empty unless needed), W_q and the gain (empty without one)."""
    tokens, hidden = x.shape
    rank = weight.shape[0]
    grad_x = forward.empty(tokens if need_x else 0, hidden, like=x)
    if tokens == 0:
        none = torch.zeros_like(weight[0] if gain is None else gain)
        return grad_x, torch.zeros_like(weight), none[: 0 if gain is None else None]
    grad_weight = forward.empty(*weight.shape, like=weight)
    grad_gain = forward.empty(0 if gain is None else hidden, like=weight)
    sizes = Rank.of(rank)
    width, rows = min(power(hidden, 16), 64 if sizes.dot else 256), 16
    blocks = triton.cdiv(hidden, width)
    splits, per_split = _splits(tokens, rows, blocks, rank * hidden)
    partial = forward.empty(splits, rank, hidden, like=weight, dtype=torch.float32)
    with on_device(x):
        backward.project_backward_kernel[(blocks, splits)](
            x,
            weight,
            gain,
            query,
            rstd,
            grad_query,
            grad_x,
            partial,
            tokens,
            hidden,
            per_split,
            HAS_GAIN=gain is not None,
            HAS_X=need_x,
            R=rank,
            RP=sizes.padded,
            DOT=sizes.dot,
            BT=rows,
            BD=width,
            num_warps=4,
        )
        backward.project_reduce_kernel[(triton.cdiv(hidden, 32),)](
            partial,
            weight,
            gain,
            grad_weight,
            grad_gain,
            hidden,
            splits,
            HAS_GAIN=gain is not None,
            R=rank,
            BD=32,
            BS=min(power(splits, 1), 64),
            num_warps=4,
        )
    return grad_x, grad_weight, grad_gain


def route_backward(
    saved: Saved, up: Upstream, *, constants: Score, normalize: bool, need_x: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, W_q, gain and anchors."""
    return route_backward_in_parts(
        "triton", saved, up, constants=constants, normalize=normalize, need_x=need_x
    )


def _splits(tokens: int, rows: int, blocks: int, numbers: int) -> tuple[int, int]:
    """Into how many parts a sum over tokens is split, and tokens per part (whole blocks)."""
    wanted = min(triton.cdiv(PROGRAMS, blocks), max(1, PARTIAL_NUMBERS // max(1, numbers)))
    per_split = triton.cdiv(triton.cdiv(tokens, max(1, wanted)), rows) * rows
    return triton.cdiv(tokens, per_split), per_split
