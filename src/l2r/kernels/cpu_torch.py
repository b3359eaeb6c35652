"""CPU backend in torch operations: where no compiler exists, other dtypes than fp32, large sizes.

The calls of ``cpu`` but ``route``, stage by stage. Tokens go in blocks that stay in the caches and
are computed again in the backward. A block of x is read once from memory for the RMS statistic
and the projection, and once more in the backward; scores exist for one block at a time, as
[B, H, N], the anchors in the middle, so that the sum over them adds contiguous rows. Products
with a few columns are matrix-vector products, which run at the speed of the memory; a general
matrix product is slower there. The core keeps queries rank-major, [R, T].

Shape letters: T tokens, B tokens of a block, D hidden size, R rank, N experts, H anchors.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from l2r.kernels.backend import Score, Selected, Upstream
from l2r.kernels.factored import (
    anchor_side,
    anchor_side_backward,
    norms,
    query_side,
    query_side_backward,
)

READ_NUMBERS = 2**18  # of x in a block, per thread: 1 MiB of fp32, half of a second-level cache
SCORE_NUMBERS = 2**17  # scores in a block, per thread
FEW_TOKENS = 16  # up to this many, calls cost more than arithmetic
VECTOR_COLUMNS = 8  # up to this many columns, one matrix-vector product each
SAFE_EXPONENT = 60.0  # |score| up to which exp needs no maximum: H exp(60) fits fp32 far


def project(
    x: Tensor, weight: Tensor, gain: Tensor | None, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """Query [T, R] and, with a gain, 1 / rms [T] of every token."""
    tokens, hidden = x.shape
    folded = _folded(weight, gain)
    norm = x.new_empty(0 if gain is None else tokens, dtype=torch.float32)
    query = x.new_empty(tokens, weight.shape[0], dtype=torch.float32)
    for block in _blocks(tokens, _read_numbers(weight, gain) // hidden):
        rows = x[block].float()
        _times_rows(folded, rows, out=query[block])
        if gain is not None:
            torch.linalg.vector_norm(rows, dim=1, out=norm[block])
    if gain is not None:
        norm.square_().mul_(1 / hidden).add_(norm_eps).rsqrt_()
        query.mul_(norm.unsqueeze(1))
    return query.to(weight.dtype), norm


def score(query: Tensor, anchors: Tensor, rho: Tensor | None, constants: Score) -> Tensor:
    """Logits [T, N]."""
    core = _Core(_columns(query), anchors, rho, constants)
    return core.all_logits().to(query.dtype)


def select(
    logits: Tensor, top_k: int, *, normalize: bool, sums: bool, save: bool = True
) -> Selected:
    """Softmax over experts and the k largest; ``save`` false leaves the log-sum-exp out."""
    wide = logits.float()
    probs = torch.softmax(wide, dim=1)
    weights, indices = torch.topk(probs, top_k, dim=1)
    total, counts = weights.new_empty(0), weights.new_empty(0, 2, logits.shape[1])
    if save:  # log sum exp = logit - log prob, exact for the most probable expert
        total = (wide.gather(1, indices[:, :1]) - weights[:, :1].log()).squeeze(1)
    if normalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    if sums:
        used = torch.bincount(indices.flatten(), minlength=logits.shape[1])
        counts = torch.stack([probs.sum(0), used.float()])
    return Selected(weights, indices, total, counts)


def select_backward(logits: Tensor, selected: Selected, up: Upstream, *, normalize: bool) -> Tensor:
    """Gradient of the logits [T, N], fp32."""
    weights, indices, lse, _ = selected
    grad = torch.sub(logits.float(), lse.unsqueeze(1)).exp_()
    through = torch.zeros_like(lse) if up.lse is None else up.lse.clone()
    chosen = None
    if up.weights is not None:
        chosen = weights * up.weights
        total = chosen.sum(dim=1)
        if normalize:
            chosen -= weights * total.unsqueeze(1)
        else:
            through -= total
    if up.share is not None:
        grad *= through.sub_(grad @ up.share).unsqueeze(1) + up.share
    else:
        grad *= through.unsqueeze(1)
    if chosen is not None:
        grad.scatter_add_(1, indices, chosen)
    return grad if up.logits is None else grad.add_(up.logits)


def score_backward(
    grad_logits: Tensor,
    query: Tensor,
    anchors: Tensor,
    rho: Tensor | None,
    logits: Tensor,
    constants: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, anchors and rho_hat (empty without one)."""
    core = _Core(_columns(query), anchors, rho, constants)
    grad_query, grad_anchors, grad_rho = core.backward(grad_logits, logits)
    none = query.new_empty(0)
    return (
        grad_query.t().contiguous().to(query.dtype),
        grad_anchors.to(anchors.dtype),
        none if grad_rho is None else grad_rho.to(query.dtype),
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
    grad, pull = _columns(grad_query), None
    if gain is not None:
        pull = ((grad * _columns(query)).sum(dim=0) * rstd.square() * (-1 / hidden)).unsqueeze(1)
        grad = grad * rstd
    grad_x = x.new_empty(tokens if need_x else 0, hidden)
    grad_folded = torch.zeros_like(folded)
    for block in _blocks(tokens, _read_numbers(weight, gain) // hidden):
        rows, columns = x[block].float(), grad[:, block]
        grad_folded.addmm_(columns, rows)
        if need_x:
            out = grad_x[block] if x.dtype == torch.float32 else torch.empty_like(rows)
            if pull is None:
                torch.mm(columns.t(), folded, out=out)
            else:
                torch.mul(rows, pull[block], out=out).addmm_(columns.t(), folded)
            if x.dtype != torch.float32:
                grad_x[block] = out
    return _unfolded(grad_x, grad_folded, weight, gain)


class _Core:
    """Pooled log-sum-exp of inner products a . b and its backward, block after block."""

    def __init__(
        self, query: Tensor, anchors: Tensor, rho: Tensor | None, constants: Score
    ) -> None:
        self.constants = constants
        self.query, self.rho = query, None if rho is None else rho.float()
        self.experts, self.heads, self.rank = anchors.shape
        self.anchors = anchors.float().permute(2, 1, 0).reshape(self.rank, -1)  # [R, H N]
        self.a = query_side(query, self.rho, constants)
        self.b = anchor_side(self.anchors, constants)
        self.safe = self.heads > 1 and self._bound() <= SAFE_EXPONENT

    def _bound(self) -> float:
        """Largest possible |a . b| (Cauchy and Schwarz)."""
        if self.a.shape[1] < FEW_TOKENS:
            return float("inf")  # finding the bound would cost more than it saves
        return float(norms(self.a).max() * norms(self.b).max())

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of tokens with their scores [B, H, N], in one buffer that is used again."""
        tokens, columns = self.a.shape[1], self.b.shape[1]
        size = max(1, SCORE_NUMBERS * torch.get_num_threads() // columns)
        buffer = self.a.new_empty(min(size, tokens), columns)
        for block in _slices(tokens, size):
            scores = buffer[: block.stop - block.start]
            torch.mm(self.a[:, block].t(), self.b, out=scores)
            yield block, scores.view(-1, self.heads, self.experts)

    def all_logits(self) -> Tensor:
        """Logits [T, N], fp32."""
        if self.heads == 1:
            return torch.mm(self.a.t(), self.b).mul_(self.constants.scale)
        logits = self.a.new_empty(self.a.shape[1], self.experts)
        for block, scores in self.blocks():
            out = logits[block]
            if self.safe:
                torch.sum(scores.exp_(), dim=1, out=out)
            else:
                torch.logsumexp(scores, dim=1, out=out)
        if self.safe:
            logits.log_()
        return logits if self.constants.scale == 1 else logits.mul_(self.constants.scale)

    def backward(self, grad_logits: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the query [R, T], the anchors [N, H, R] and rho_hat."""
        weight = grad_logits * self.constants.scale
        if self.heads == 1:
            return self._ends(torch.mm(self.b, weight.t()), torch.mm(self.a, weight))
        grad_a, grad_b = torch.empty_like(self.a), torch.zeros_like(self.b)
        pooled = logits.float() / self.constants.scale
        if self.safe:
            weight *= torch.exp(-pooled)
        for block, scores in self.blocks():
            if self.safe:
                scores.exp_().mul_(weight[block].unsqueeze(1))
            else:
                scores.sub_(pooled[block].unsqueeze(1)).exp_().mul_(weight[block].unsqueeze(1))
            flat = scores.reshape(-1, self.b.shape[1])
            _times_rows(self.b, flat, out=grad_a[:, block].t())
            grad_b.addmm_(self.a[:, block], flat)
        return self._ends(grad_a, grad_b)

    def _ends(self, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        grad_query, grad_rho = query_side_backward(grad_a, self.query, self.rho, self.constants)
        grad_anchors = anchor_side_backward(grad_b, self.anchors, self.constants)
        shape = self.rank, self.heads, self.experts
        return grad_query, grad_anchors.view(shape).permute(2, 1, 0).contiguous(), grad_rho


def _columns(query: Tensor) -> Tensor:
    """[T, R] as rank-major fp32 [R, T]."""
    return query.t().contiguous().float()


def _folded(weight: Tensor, gain: Tensor | None) -> Tensor:
    """W_q with the gain of the norm folded in, fp32 [R, D]."""
    return weight.float() if gain is None else weight.float() * gain


def _unfolded(
    grad_x: Tensor, grad_folded: Tensor, weight: Tensor, gain: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Share the gradient of W_q times gain between the two."""
    if gain is None:
        return grad_x, grad_folded.to(weight.dtype), weight.new_empty(0)
    grad_gain = (grad_folded * weight).sum(dim=0)
    return grad_x, (grad_folded * gain).to(weight.dtype), grad_gain.to(gain.dtype)


def _read_numbers(weight: Tensor, gain: Tensor | None) -> int:
    """Numbers of x in a block: all of them where a matrix product is all there is to do."""
    return 2**62 if gain is None and weight.shape[0] > VECTOR_COLUMNS else READ_NUMBERS


def _times_rows(weight: Tensor, rows: Tensor, *, out: Tensor) -> None:
    """rows [B, D] times weight [R, D] transposed: out [B, R]."""
    if weight.shape[0] <= VECTOR_COLUMNS:
        for vector, target in zip(weight, out.unbind(1), strict=True):
            target.copy_(torch.mv(rows, vector))
    else:
        torch.mm(rows, weight.t(), out=out)


def _blocks(tokens: int, per_thread: int) -> Iterator[slice]:
    return _slices(tokens, max(1, per_thread * torch.get_num_threads()))


def _slices(tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))
