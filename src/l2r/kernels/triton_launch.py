"""Launches of the forward kernel on plain tensors: shapes, block sizes, no autograd.

Block sizes are a fixed function of the shapes, not searched at run time: results are the same in
every process, a first call compiles and nothing more, and a CUDA graph can be captured at once.
Nothing here waits for the device.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from l2r.kernels.backend import Score, Selected
from l2r.kernels.triton_forward import forward_kernel
from l2r.kernels.triton_sizes import SCORINGS, Rank, on_device, power


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
    row = power(experts, 16)
    columns = row if select else min(row, 64)
    matrix = Rank.of(rank).dot and (project or score)
    if matrix:
        warps = 4 if columns <= 256 else 8
        return Forward(16, min(power(hidden, 16), 64), columns, warps)
    if project:
        width = min(power(hidden, 16), 2048)
        return Forward(max(1, min(8192 // width, 8, 4096 // columns)), width, columns, 4)
    tokens = max(1, min(2048 // columns, 16))
    return Forward(tokens, 16, columns, 4)


def one_launch(rank: int, experts: int) -> bool:
    """Whether all three stages fit in one program's registers and shared memory."""
    return experts <= 512 if not Rank.of(rank).dot else power(experts, 16) * rank <= 8192


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


def select(
    logits: Tensor, top_k: int, *, normalize: bool, sums: bool, save: bool = True
) -> Selected:
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
    save: bool = True,
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
    with on_device(any_tensor):
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
            SCORING=SCORINGS[constants.scoring],
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
