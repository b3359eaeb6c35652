"""CPU backend: the tokens in blocks that stay in the caches, recomputed in the backward.

The same calls as ``triton_launch``. A block of x is read once from memory for the RMS statistic
and the projection, and once more in the backward; scores exist for one block at a time, as
[B, H, N], the anchors outermost, so that the sum over them is a sum of contiguous rows. Products
with a few columns are matrix-vector products, which run at the speed of the memory; a general
matrix product with two columns is about twice as slow.

Shape letters: T tokens, B tokens of a block, D hidden size, R rank, N experts, H anchors.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from l2r.kernels.backend import Score, Selected
from l2r.kernels.factored import (
    anchor_side,
    anchor_side_backward,
    query_side,
    query_side_backward,
)

READ_NUMBERS = 2**19  # of x in a block: 2 MiB of fp32, within the second-level caches
SCORE_NUMBERS = 2**18  # scores in a block
VECTOR_COLUMNS = 8  # up to this many columns, one matrix-vector product each
SAFE_EXPONENT = 60.0  # |score| up to which exp needs no maximum: H exp(60) fits fp32 far


def project(
    x: Tensor, weight: Tensor, gain: Tensor | None, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """Query [T, R] and, with a gain, 1 / rms [T] of every token."""
    tokens, hidden = x.shape
    folded = _folded(weight, gain)
    query = x.new_empty(weight.shape[0], tokens, dtype=torch.float32)
    rstd = x.new_empty(0 if gain is None else tokens, dtype=torch.float32)
    for block in _blocks(tokens, READ_NUMBERS // hidden):
        rows = x[block].float()
        _times_transpose(folded, rows, out=query[:, block])
        if gain is not None:
            torch.linalg.vector_norm(rows, dim=1, out=rstd[block])
    if gain is not None:
        rstd = torch.rsqrt(rstd.square_().mul_(1 / hidden).add_(norm_eps))
        query *= rstd
    return query.t().to(weight.dtype, memory_format=torch.contiguous_format), rstd


def score(query: Tensor, anchors: Tensor, rho: Tensor | None, constants: Score) -> Tensor:
    """Logits [T, N]."""
    side = query_side(query.float(), None if rho is None else rho.float(), constants)
    core = _Core(anchor_side(anchors.float(), constants), side, constants.scale)
    logits = query.new_empty(query.shape[0], anchors.shape[0], dtype=torch.float32)
    for block in core.blocks():
        core.logits(block, out=logits[block])
    return logits.to(query.dtype)


def select(logits: Tensor, top_k: int, *, normalize: bool, sums: bool) -> Selected:
    """Softmax over experts and the k largest."""
    wide = logits.float()
    lse = torch.logsumexp(wide, dim=1)
    probs = torch.exp(wide - lse.unsqueeze(1))
    weights, indices = torch.topk(probs, top_k, dim=1)
    if normalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    if not sums:
        return Selected(weights, indices, lse, lse.new_empty(0, 2, logits.shape[1]))
    used = torch.bincount(indices.flatten(), minlength=logits.shape[1])
    return Selected(weights, indices, lse, torch.stack([probs.sum(0), used.float()]))


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
) -> tuple[Tensor, Tensor, Tensor, Selected]:
    """Everything: query, 1 / rms, logits and the selection."""
    query, rstd = project(x, weight, gain, norm_eps)
    logits = score(query, anchors, None, constants)
    return query, rstd, logits, select(logits, top_k, normalize=normalize, sums=sums)


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
    weights, indices, lse, _ = selected
    grad = torch.sub(logits.float(), lse.unsqueeze(1)).exp_()
    through = torch.zeros_like(lse) if grad_lse is None else grad_lse.clone()
    chosen = None
    if grad_weights is not None:
        chosen = weights * grad_weights
        total = chosen.sum(dim=1)
        if normalize:
            chosen -= weights * total.unsqueeze(1)
        else:
            through -= total
    if grad_share is not None:
        grad *= through.sub_(grad @ grad_share).unsqueeze(1) + grad_share
    else:
        grad *= through.unsqueeze(1)
    if chosen is not None:
        grad.scatter_add_(1, indices, chosen)
    return grad if grad_logits is None else grad.add_(grad_logits)


def score_backward(
    grad_logits: Tensor,
    query: Tensor,
    anchors: Tensor,
    rho: Tensor | None,
    logits: Tensor,
    constants: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, anchors and rho_hat (empty without one)."""
    wide = query.float(), anchors.float(), None if rho is None else rho.float()
    side = query_side(wide[0], wide[2], constants)
    core = _Core(anchor_side(wide[1], constants), side, constants.scale)
    grad_side = torch.empty_like(side)
    for block in core.blocks():
        core.backward(block, grad_logits[block], logits[block], out=grad_side[block])
    grad_query, grad_rho = query_side_backward(grad_side, wide[0], wide[2], constants)
    grad_anchors = anchor_side_backward(core.grad_anchor_side(), wide[1], constants)
    return (
        grad_query.to(query.dtype),
        grad_anchors.to(anchors.dtype, memory_format=torch.contiguous_format),
        query.new_empty(0) if rho is None or grad_rho is None else grad_rho.to(query.dtype),
    )


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
    folded = _folded(weight, gain)
    grad = grad_query.float()
    pull = None
    if gain is not None:
        pull = (grad * query.float()).sum(dim=1) * rstd.square() * (-1 / hidden)
        grad = grad * rstd.unsqueeze(1)
    grad_x = x.new_empty(tokens if need_x else 0, hidden)
    grad_folded = torch.zeros_like(folded)
    for block in _blocks(tokens, READ_NUMBERS // hidden):
        rows = x[block].float()
        grad_folded.addmm_(grad[block].t(), rows)
        if need_x:
            part = torch.mm(grad[block], folded)
            if pull is not None:
                part.addcmul_(rows, pull[block].unsqueeze(1))
            grad_x[block] = part
    if gain is None:
        return grad_x, grad_folded.to(weight.dtype), weight.new_empty(0)
    grad_gain = (grad_folded * weight).sum(dim=0)
    return grad_x, (grad_folded * gain).to(weight.dtype), grad_gain.to(gain.dtype)


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


class _Core:
    """Pooled log-sum-exp of inner products a . b and its backward, a block of tokens at a time."""

    def __init__(self, anchor_side: Tensor, query_side: Tensor, scale: float) -> None:
        self.experts, self.heads, self.rank = anchor_side.shape
        self.columns = anchor_side.transpose(0, 1).reshape(-1, self.rank)  # [H N, R]
        self.query_side = query_side
        self.scale = scale
        self.safe = self.heads == 1 or self._bound() <= SAFE_EXPONENT
        self.grad_columns = torch.zeros(0)

    def _bound(self) -> float:
        """Largest possible |a . b| (Cauchy and Schwarz)."""
        if self.query_side.numel() == 0:
            return 0.0
        longest = [
            torch.linalg.vector_norm(side, dim=1).max() for side in (self.query_side, self.columns)
        ]
        return (longest[0] * longest[1]).item()

    def blocks(self) -> Iterator[slice]:
        """Blocks of tokens whose scores fit in the caches."""
        return _blocks(self.query_side.shape[0], SCORE_NUMBERS // self.columns.shape[0])

    def scores(self, block: slice) -> Tensor:
        """Scores [B, H, N] of a block."""
        return torch.mm(self.query_side[block], self.columns.t()).view(-1, self.heads, self.experts)

    def logits(self, block: slice, *, out: Tensor) -> None:
        """Logits [B, N] of a block."""
        scores = self.scores(block)
        if self.heads == 1:
            torch.mul(scores[:, 0], self.scale, out=out)
        elif self.safe:
            torch.sum(scores.exp_(), dim=1, out=out).log_().mul_(self.scale)
        else:
            torch.logsumexp(scores, dim=1, out=out).mul_(self.scale)

    def backward(self, block: slice, grad: Tensor, logits: Tensor, *, out: Tensor) -> None:
        """Add a block to the gradient of b, write that of a; grad and logits are [B, N]."""
        grad = grad * self.scale
        if self.heads > 1:
            pooled = logits.float() / self.scale
            scores = self.scores(block)
            if self.safe:
                scores.exp_().mul_((grad * torch.exp(-pooled)).unsqueeze(1))
            else:
                scores.sub_(pooled.unsqueeze(1)).exp_().mul_(grad.unsqueeze(1))
            grad = scores.view(-1, self.columns.shape[0])
        if self.grad_columns.numel() == 0:
            self.grad_columns = torch.zeros_like(self.columns)
        side = self.query_side[block]
        torch.mm(grad, self.columns, out=out)
        self.grad_columns.addmm_(grad.t(), side)

    def grad_anchor_side(self) -> Tensor:
        """Gradient of b [N, H, R]."""
        if self.grad_columns.numel() == 0:
            self.grad_columns = torch.zeros_like(self.columns)
        return self.grad_columns.view(self.heads, self.experts, self.rank).transpose(0, 1)


def _folded(weight: Tensor, gain: Tensor | None) -> Tensor:
    """W_q with the gain of the norm folded in, fp32 [R, D]."""
    return weight.float() if gain is None else weight.float() * gain


def _times_transpose(weight: Tensor, rows: Tensor, *, out: Tensor) -> None:
    """weight [R, D] times rows [B, D] transposed: out [R, B]."""
    if weight.shape[0] <= VECTOR_COLUMNS:
        for vector, target in zip(weight, out, strict=True):
            torch.mv(rows, vector, out=target)
    else:
        torch.mm(weight, rows.t(), out=out)


def _blocks(tokens: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))
