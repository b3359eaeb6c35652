"""Launches of the Triton kernels on plain tensors: shapes, block sizes, no autograd.

Block sizes are a fixed function of the shapes, not searched at run time: results are the same in
every process, a first call compiles and nothing more, and a CUDA graph can be captured at once.
Nothing here waits for the device.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from l2r.kernels import triton_backward as backward
from l2r.kernels.backend import Score, Selected
from l2r.kernels.triton_blocks import COSINE_SCORES, DOT_SCORES, SIPS_SCORES
from l2r.kernels.triton_forward import forward_kernel

MAX_EXPERTS = 1024
MAX_HEADS = 64
MAX_RANK = 64
PROGRAMS = 512  # programs wanted for a sum over tokens: about four per multiprocessor
PARTIAL_NUMBERS = 2**21  # most numbers that the partial sums of one launch hold

_SCORINGS = {"dot": DOT_SCORES, "cosine": COSINE_SCORES, "sips": SIPS_SCORES}


class Rank(NamedTuple):
    """How products over the rank run: padded size, and whether on the matrix units."""

    padded: int
    dot: bool

    @classmethod
    def of(cls, rank: int) -> "Rank":
        padded = triton.next_power_of_2(rank)
        return cls(padded, False) if padded <= 4 else cls(max(16, padded), True)


class Forward(NamedTuple):
    """Blocks of a forward launch."""

    tokens: int
    hidden: int
    experts: int
    warps: int


def empty(*shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised output on the device of ``like``; the tests fill it with NaN."""
    return torch.empty(shape, device=like.device, dtype=dtype or like.dtype)


def forward_blocks(
    *, rank: int, hidden: int, experts: int, project: bool, score: bool, select: bool
) -> Forward:
    """Block sizes of a forward launch of the given stages."""
    row = _power(experts, 16)
    columns = row if select else min(row, 64)
    matrix = Rank.of(rank).dot and (project or score)
    if matrix:
        warps = 4 if columns <= 256 else 8
        return Forward(16, min(_power(hidden, 16), 64), columns, warps)
    if project:
        width = min(_power(hidden, 16), 2048)
        return Forward(max(1, min(8192 // width, 8, 4096 // columns)), width, columns, 4)
    tokens = max(1, min(2048 // columns, 16))
    return Forward(tokens, 16, columns, 4)


def one_launch(rank: int, experts: int) -> bool:
    """Whether all three stages fit in one program's registers and shared memory."""
    return experts <= 512 if not Rank.of(rank).dot else _power(experts, 16) * rank <= 8192


def project(
    x: Tensor, weight: Tensor, gain: Tensor | None, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """Query [T, R] and, with a gain, 1 / rms [T] of every token."""
    query = empty(x.shape[0], weight.shape[0], like=weight)
    rstd = empty(x.shape[0] if gain is not None else 0, like=weight, dtype=torch.float32)
    _forward(x=x, weight=weight, gain=gain, norm_eps=norm_eps, query=query, rstd=rstd)
    return query, rstd


def score(query: Tensor, anchors: Tensor, rho: Tensor | None, constants: Score) -> Tensor:
    """Logits [T, N]."""
    logits = empty(query.shape[0], anchors.shape[0], like=query)
    _forward(query=query, rho=rho, anchors=anchors, constants=constants, logits=logits)
    return logits


def select(logits: Tensor, top_k: int, *, normalize: bool, sums: bool) -> Selected:
    """Softmax over experts and the k largest."""
    return _forward(logits=logits, top_k=top_k, normalize=normalize, sums=sums)


def route(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    anchors: Tensor,
    *,
    norm_eps: float,
    constants: Score,
    top_k: int,
    normalize: bool,
    sums: bool,
    lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Selected]:
    """Everything: query, rstd, logits and the selection; one launch where it fits."""
    rank, experts = weight.shape[0], anchors.shape[0]
    if not one_launch(rank, experts):
        query, rstd = project(x, weight, gain, norm_eps)
        logits = score(query, anchors, None, constants)
        return query, rstd, logits, select(logits, top_k, normalize=normalize, sums=sums)
    query = empty(x.shape[0], rank, like=weight)
    rstd = empty(x.shape[0] if gain is not None else 0, like=weight, dtype=torch.float32)
    logits = empty(x.shape[0], experts, like=weight)
    selected = _forward(
        x=x,
        weight=weight,
        gain=gain,
        norm_eps=norm_eps,
        query=query,
        rstd=rstd,
        anchors=anchors,
        constants=constants,
        logits=logits,
        top_k=top_k,
        normalize=normalize,
        sums=sums,
    )
    return query, rstd, logits, selected


_NO_SCORE = Score("dot", 0.0, 0.0, 1.0, 1.0, 1.0)


def _forward(
    *,
    x: Tensor | None = None,
    weight: Tensor | None = None,
    gain: Tensor | None = None,
    norm_eps: float = 0.0,
    query: Tensor | None = None,
    rstd: Tensor | None = None,
    rho: Tensor | None = None,
    anchors: Tensor | None = None,
    constants: Score = _NO_SCORE,
    logits: Tensor | None = None,
    top_k: int = 0,
    normalize: bool = False,
    sums: bool = False,
) -> Selected:
    """One launch of the stages whose inputs and outputs are given."""
    any_tensor = query if query is not None else logits
    assert any_tensor is not None
    tokens, rank = any_tensor.shape[0], 1 if query is None else query.shape[1]
    experts = 1 if logits is None else logits.shape[1]
    heads = 1 if anchors is None else anchors.shape[1]
    hidden = 1 if x is None else x.shape[1]
    stages = {"project": x is not None, "score": anchors is not None, "select": top_k > 0}
    blocks = forward_blocks(rank=rank, hidden=hidden, experts=experts, **stages)
    programs = triton.cdiv(tokens, blocks.tokens)
    selected = Selected(
        empty(tokens, top_k, like=any_tensor, dtype=torch.float32),
        empty(tokens, top_k, like=any_tensor, dtype=torch.int64),
        empty(tokens if top_k else 0, like=any_tensor, dtype=torch.float32),
        empty(programs if sums else 0, 2, experts, like=any_tensor, dtype=torch.float32),
    )
    if tokens == 0:
        return selected._replace(sums=selected.sums.sum(0)) if sums else selected
    columns = 1 if top_k or anchors is None else triton.cdiv(experts, blocks.experts)
    with _on(any_tensor):
        forward_kernel[(programs, columns)](
            x,
            weight,
            gain,
            query,
            rstd,
            rho,
            anchors,
            logits,
            selected.weights,
            selected.indices,
            selected.lse,
            selected.sums,
            tokens,
            hidden,
            experts,
            top_k,
            norm_eps,
            constants.gamma,
            constants.beta,
            constants.p,
            constants.eps,
            constants.scale,
            PROJECT=stages["project"],
            SCORE=stages["score"],
            SELECT=stages["select"],
            HAS_GAIN=gain is not None,
            HAS_RHO=rho is not None,
            HAS_SUMS=sums,
            NORMALIZE=normalize,
            SCORING=_SCORINGS[constants.scoring],
            H=heads,
            R=rank,
            RP=Rank.of(rank).padded,
            DOT=Rank.of(rank).dot,
            BT=blocks.tokens,
            BD=blocks.hidden,
            BN=blocks.experts,
            num_warps=blocks.warps,
        )
    return selected._replace(sums=selected.sums.sum(0)) if sums else selected


def select_backward(
    logits: Tensor,
    selected: Selected,
    *,
    normalize: bool,
    grad_logits: Tensor | None,
    grad_weights: Tensor | None,
    grad_lse: Tensor | None,
    grad_share: Tensor | None,
) -> Tensor:
    """Gradient of the logits [T, N], fp32."""
    tokens, experts = logits.shape
    out = empty(tokens, experts, like=logits, dtype=torch.float32)
    if tokens == 0:
        return out
    columns = _power(experts, 16)
    rows = max(1, min(2048 // columns, 16))
    with _on(logits):
        backward.select_backward_kernel[(triton.cdiv(tokens, rows),)](
            logits,
            selected.lse,
            selected.indices,
            selected.weights,
            grad_logits,
            grad_weights,
            grad_lse,
            grad_share,
            out,
            tokens,
            experts,
            selected.weights.shape[1],
            HAS_LOGITS=grad_logits is not None,
            HAS_WEIGHTS=grad_weights is not None,
            HAS_LSE=grad_lse is not None,
            HAS_SHARE=grad_share is not None,
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
    grad_query = torch.empty_like(query) if tokens == 0 else empty(tokens, rank, like=query)
    grad_rho = empty(0 if rho is None else tokens, like=query)
    if tokens == 0:
        return grad_query, torch.zeros_like(anchors), grad_rho
    sizes = Rank.of(rank)
    shared = {
        "HAS_RHO": rho is not None,
        "SCORING": _SCORINGS[constants.scoring],
        "H": heads,
        "R": rank,
        "RP": sizes.padded,
        "DOT": sizes.dot,
        "num_warps": 4,
    }
    floats = constants[1:]
    columns = min(_power(experts * heads, 16), 64 if sizes.dot else 256)
    rows = 16 if sizes.dot else 8
    with _on(query):
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
        partial = empty(splits, *anchors.shape, like=anchors, dtype=torch.float32)
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
        grad_anchors = empty(*anchors.shape, like=anchors)
        columns = min(_power(experts * heads, 16), 32)
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
            BS=min(_power(splits, 1), max(1, 4096 // (columns * sizes.padded))),
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
    grad_x = empty(tokens if need_x else 0, hidden, like=x)
    if tokens == 0:
        none = torch.zeros_like(weight[0] if gain is None else gain)
        return grad_x, torch.zeros_like(weight), none[: 0 if gain is None else None]
    grad_weight = empty(*weight.shape, like=weight)
    grad_gain = empty(0 if gain is None else hidden, like=weight)
    sizes = Rank.of(rank)
    width, rows = min(_power(hidden, 16), 64 if sizes.dot else 256), 16
    blocks = triton.cdiv(hidden, width)
    splits, per_split = _splits(tokens, rows, blocks, rank * hidden)
    partial = empty(splits, rank, hidden, like=weight, dtype=torch.float32)
    with _on(x):
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
            BS=min(_power(splits, 1), 64),
            num_warps=4,
        )
    return grad_x, grad_weight, grad_gain


def route_backward(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    anchors: Tensor,
    logits: Tensor,
    selected: Selected,
    query: Tensor,
    rstd: Tensor,
    grad_logits: Tensor | None,
    grad_weights: Tensor | None,
    grad_lse: Tensor | None,
    grad_share: Tensor | None,
    *,
    constants: Score,
    normalize: bool,
    need_x: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, W_q, gain and anchors."""
    grad = select_backward(
        logits,
        selected,
        normalize=normalize,
        grad_logits=grad_logits,
        grad_weights=grad_weights,
        grad_lse=grad_lse,
        grad_share=grad_share,
    )
    grad_query, grad_anchors, _ = score_backward(grad, query, anchors, None, logits, constants)
    grads = project_backward(grad_query, x, weight, gain, query, rstd, need_x=need_x)
    return *grads, grad_anchors


def _splits(tokens: int, rows: int, blocks: int, numbers: int) -> tuple[int, int]:
    """Into how many parts a sum over tokens is split, and tokens per part (whole blocks)."""
    wanted = min(triton.cdiv(PROGRAMS, blocks), max(1, PARTIAL_NUMBERS // max(1, numbers)))
    per_split = triton.cdiv(triton.cdiv(tokens, max(1, wanted)), rows) * rows
    return triton.cdiv(tokens, per_split), per_split


def _power(size: int, smallest: int) -> int:
    return max(smallest, triton.next_power_of_2(size))


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's device, also where another one is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
