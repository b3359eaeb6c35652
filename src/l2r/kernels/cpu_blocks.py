"""CPU backend in torch operations: where no compiler exists, other dtypes than fp32, large sizes.

The logits are computed in blocks of tokens that stay in the caches, and again in the
backward. Scores exist for one block at a time, as [B, H, N], so that the sum over anchors adds
contiguous rows. Products with a few columns are matrix-vector products, at the speed of memory.

Every score is one inner product, logits[t, n] = log sum_h exp(a_t . b_nh), see README.md. Vectors
are columns, queries [R, T] and anchors [R, H N]: sums over a small rank are sums of long rows.

Shape letters: T tokens, B tokens of a block, D hidden size, R rank, N experts, H anchors.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from l2r.functional import best_experts, phi, psi
from l2r.functional.scoring import ScoreConstants
from l2r.kernels.checks import check_routes
from l2r.kernels.contract import Options, Tensors

_READ_NUMBERS = 2**18  # of x in a block, per thread: 1 MiB of fp32, half of a second-level cache
_SCORE_NUMBERS = 2**17  # scores in a block, per thread
FEW_TOKENS = 16  # up to this many, calls cost more than arithmetic
_VECTOR_COLUMNS = 8  # up to this many columns, one matrix-vector product each
_SAFE_EXPONENT = 60.0  # |score| up to which exp needs no maximum: H exp(60) fits fp32 far


def route_logits(given: Tensors, score: ScoreConstants) -> Tensors:
    """Compute the logits of a router, and what their backward reads."""
    projected = _project(given, score)
    assert given.anchors is not None
    pooled = _Core(projected, score).all_logits().to(given.anchors.dtype)
    return projected._replace(logits=pooled)


def route_logits_backward(tensors: Tensors, grad: Tensor, options: Options) -> Tensors:
    """Compute the gradients of x, if wanted, and of the parameters from that of the logits."""
    grad_query, anchors = _Core(tensors, options.score).backward(grad)
    grads = _project_backward(tensors, grad_query, need_x=options.need_x)
    return grads._replace(anchors=anchors)


def select(given: Tensors, options: Options) -> Tensors:
    """Softmax weights and indices of the top-k logits or of given routes; lse where it is saved."""
    assert given.logits is not None
    wide = given.logits.float()
    probs, indices = torch.softmax(wide, dim=1), _best(wide, options.top_k)
    lse = None
    if options.save:  # log sum exp = logit - log prob, exact for the most probable expert
        first = indices[:, :1]
        lse = (wide.gather(1, first) - probs.gather(1, first).log()).squeeze(1)
    if given.routes is not None:
        check_routes(given.routes, wide.shape[1])
        indices = torch.where(given.routes[:, :1] < 0, indices, given.routes)
    if options.normalize:  # of the k logits alone: all k of a route may be unlikely
        weights = torch.softmax(wide.gather(1, indices), dim=1)
    else:
        weights = probs.gather(1, indices)
    return given._replace(weights=weights, indices=indices, lse=lse)


def select_backward(tensors: Tensors, up: Tensors, *, normalize: bool) -> Tensor:
    """Gradient of the logits [T, N], fp32."""
    logits, weights, indices, lse = tensors.logits, tensors.weights, tensors.indices, tensors.lse
    assert logits is not None and weights is not None and indices is not None and lse is not None
    if up.weights is None:
        assert up.logits is not None
        return up.logits.float()
    chosen = weights * up.weights
    total = chosen.sum(dim=1, keepdim=True)
    if normalize:
        grad = torch.zeros_like(logits, dtype=torch.float32)
        chosen -= weights * total
    else:
        grad = torch.sub(logits.float(), lse.unsqueeze(1)).exp_().mul_(-total)
    grad.scatter_add_(1, indices, chosen)
    return grad if up.logits is None else grad.add_(up.logits)


def _best(logits: Tensor, top_k: int) -> Tensor:
    """``best_experts``; sorts all of them only where there are equals, or NaN, to put in order."""
    if logits.is_cpu:  # another device would have to be waited for
        values, indices = torch.topk(logits, min(top_k + 1, logits.shape[1]), dim=1)
        if bool((values[:, 1:] < values[:, :-1]).all()):
            return indices[:, :top_k].contiguous()
    return best_experts(logits, top_k)


def _project(given: Tensors, score: ScoreConstants) -> Tensors:
    x, weight, gain = given.x, given.weight, given.gain
    assert x is not None and weight is not None
    tokens, hidden = x.shape
    folded = _folded(weight, gain)
    rstd = None if gain is None else x.new_empty(tokens, dtype=torch.float32)
    query = x.new_empty(tokens, weight.shape[0], dtype=torch.float32)
    for block in _blocks(tokens, _read_size(weight, gain)):
        rows = x[block].float()
        _times_rows(folded, rows, out=query[block])
        if rstd is not None:
            torch.linalg.vector_norm(rows, dim=1, out=rstd[block])
    if rstd is not None:  # holds the norms until here
        rstd.square_().mul_(1 / hidden).add_(score.norm_eps).rsqrt_()
        query.mul_(rstd.unsqueeze(1))
    return given._replace(query=query.to(weight.dtype), rstd=rstd)


def _project_backward(tensors: Tensors, grad_query: Tensor, *, need_x: bool) -> Tensors:
    x, weight, gain, query, rstd = (
        tensors.x,
        tensors.weight,
        tensors.gain,
        tensors.query,
        tensors.rstd,
    )
    assert x is not None and weight is not None and query is not None
    tokens, hidden = x.shape
    folded = _folded(weight, gain)
    grad, pull = _columns(grad_query), None
    if rstd is not None:
        pull = ((grad * _columns(query)).sum(dim=0) * rstd.square() * (-1 / hidden)).unsqueeze(1)
        grad = grad * rstd
    grad_x = x.new_empty(tokens if need_x else 0, hidden)
    grad_folded = torch.zeros_like(folded)
    for block in _blocks(tokens, _read_size(weight, gain)):
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
    grad_gain = None
    if gain is not None:
        grad_gain = (grad_folded * weight).sum(dim=0).to(gain.dtype)
        grad_folded *= gain
    grad_weight = grad_folded.to(weight.dtype)
    return Tensors(x=grad_x if need_x else None, weight=grad_weight, gain=grad_gain)


class _Core:
    """Pooled log-sum-exp of inner products a . b and its backward, block after block."""

    def __init__(self, tensors: Tensors, score: ScoreConstants) -> None:
        anchors, query = tensors.anchors, tensors.query
        assert anchors is not None and query is not None
        self.given, self.score = tensors, score
        self.experts, self.heads, self.rank = anchors.shape
        self.query = _columns(query)
        self.anchors = anchors.float().permute(2, 1, 0).reshape(self.rank, -1)  # [R, H N]
        self.a = _side(self.query, score, partial(phi, gamma=score.gamma, beta=score.beta))
        self.b = _side(self.anchors, score, partial(psi, p=score.p))
        self.safe = False
        # On few tokens it costs more than it saves; on another device it would wait for a number.
        if self.heads > 1 and self.a.shape[1] >= FEW_TOKENS and self.a.is_cpu:
            largest = _norms(self.a).max() * _norms(self.b).max()  # of |a . b|
            self.safe = float(largest) <= _SAFE_EXPONENT

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over blocks of tokens and their scores [B, H, N], which share one buffer."""
        tokens, columns = self.a.shape[1], self.b.shape[1]
        size = max(1, _SCORE_NUMBERS * torch.get_num_threads() // columns)
        buffer = self.a.new_empty(min(size, tokens), columns)
        for block in _blocks(tokens, size):
            scores = buffer[: block.stop - block.start]
            torch.mm(self.a[:, block].t(), self.b, out=scores)
            yield block, scores.view(-1, self.heads, self.experts)

    def all_logits(self) -> Tensor:
        """Logits [T, N], fp32."""
        if self.heads == 1:
            return torch.mm(self.a.t(), self.b).mul_(self.score.scale)
        logits = self.a.new_empty(self.a.shape[1], self.experts)
        for block, scores in self.blocks():
            out = logits[block]
            if self.safe:
                torch.sum(scores.exp_(), dim=1, out=out)
            else:
                torch.logsumexp(scores, dim=1, out=out)
        if self.safe:
            logits.log_()
        return logits if self.score.scale == 1 else logits.mul_(self.score.scale)

    def backward(self, grad_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the query [T, R] and of the anchors [N, H, R]."""
        logits = self.given.logits
        assert logits is not None
        weight = grad_logits.float() * self.score.scale
        if self.heads == 1:
            return self._grads(torch.mm(self.b, weight.t()), torch.mm(self.a, weight))
        grad_a, grad_b = torch.empty_like(self.a), torch.zeros_like(self.b)
        pooled = logits.float() / self.score.scale
        if self.safe:
            weight *= torch.exp(-pooled)
        for block, scores in self.blocks():
            if not self.safe:
                scores.sub_(pooled[block].unsqueeze(1))
            scores.exp_().mul_(weight[block].unsqueeze(1))
            flat = scores.reshape(-1, self.b.shape[1])
            _times_rows(self.b, flat, out=grad_a[:, block].t())
            grad_b.addmm_(self.a[:, block], flat)
        return self._grads(grad_a, grad_b)

    def _grads(self, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, Tensor]:
        anchors, query = self.given.anchors, self.given.query
        assert anchors is not None and query is not None
        grad_query = _query_side_backward(grad_a, self.query, self.score)
        grad_anchors = _anchor_side_backward(grad_b, self.anchors, self.score)
        grad_anchors = grad_anchors.view(self.rank, self.heads, self.experts).permute(2, 1, 0)
        return (
            grad_query.t().contiguous().to(query.dtype),
            grad_anchors.contiguous().to(anchors.dtype),
        )


def _columns(query: Tensor) -> Tensor:
    """[T, R] as rank-major fp32 [R, T]."""
    return query.t().contiguous().float()


def _folded(weight: Tensor, gain: Tensor | None) -> Tensor:
    """W_q with the gain of the norm folded in, fp32 [R, D]."""
    return weight.float() if gain is None else weight.float() * gain


def _read_size(weight: Tensor, gain: Tensor | None) -> int:
    """Tokens in a block of x: all of them where a matrix product is all there is to do."""
    if gain is None and weight.shape[0] > _VECTOR_COLUMNS:
        return 2**62
    return max(1, _READ_NUMBERS // weight.shape[1] * torch.get_num_threads())


def _times_rows(weight: Tensor, rows: Tensor, *, out: Tensor) -> None:
    """rows [B, D] times weight [R, D] transposed: out [B, R]."""
    if weight.shape[0] <= _VECTOR_COLUMNS:
        for vector, target in zip(weight, out.unbind(1), strict=True):
            target.copy_(torch.mv(rows, vector))
    else:
        torch.mm(rows, weight.t(), out=out)


def _blocks(tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _norms(vectors: Tensor) -> Tensor:
    """Length of every column; torch's vector_norm over a short first dimension is 10x slower."""
    return torch.square(vectors).sum(dim=0).sqrt_()


def _side(vectors: Tensor, score: ScoreConstants, magnitude: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a or b: the vectors (dot), their directions (cosine), these by a magnitude (sips)."""
    if score.scoring == "dot":
        return vectors
    norm = _norms(vectors)
    if score.scoring == "cosine":
        return vectors / norm.clamp_min_(score.eps)
    return vectors * magnitude(norm).div_(norm.clamp_min_(score.eps))


def _query_side_backward(grad: Tensor, query: Tensor, score: ScoreConstants) -> Tensor:
    """Gradient of the query from that of a."""
    if score.scoring == "dot":
        return grad
    norm, grad_norm = _norms(query), None
    if score.scoring == "sips":
        t = torch.tanh(norm)
        grad_factor = (grad * query).sum(dim=0) / norm.clamp_min(score.eps)
        grad_norm = grad_factor * (1 - t.square()) * (score.gamma * score.beta)
        grad = grad * (score.gamma * (1 + score.beta * t))
    return _direction_backward(grad, query, norm, grad_norm, score.eps)


def _anchor_side_backward(grad: Tensor, anchors: Tensor, score: ScoreConstants) -> Tensor:
    """Gradient of the anchors from that of b."""
    if score.scoring == "dot":
        return grad
    norm, grad_norm = _norms(anchors), None
    if score.scoring == "sips":
        grad_norm = (grad * anchors).sum(dim=0) / norm.clamp_min(score.eps) / score.p
        grad = grad * psi(norm, p=score.p)
    return _direction_backward(grad, anchors, norm, grad_norm, score.eps)


def _direction_backward(
    grad: Tensor, vector: Tensor, norm: Tensor, grad_norm: Tensor | None, eps: float
) -> Tensor:
    """Gradient of v from that of u = v / max(|v|, eps) and, if given, that of |v|."""
    inverse = norm.clamp_min(eps).reciprocal()
    along = (grad * vector).sum(dim=0) * inverse.square()
    pull = torch.where(norm >= eps, along, 0.0) * -inverse  # below eps the divisor is constant
    if grad_norm is not None:
        pull = pull + torch.where(norm > 0, grad_norm / norm, 0.0)
    return grad * inverse + vector * pull
