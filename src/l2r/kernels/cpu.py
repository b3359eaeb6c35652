"""CPU backend: the compiled kernels for fp32 tokens, torch operations for the rest.

The same calls as ``triton_backend``. Tensors are contiguous.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors, K chosen.
"""

import torch
from torch import Tensor

from l2r.kernels import cpu_native as native
from l2r.kernels import cpu_torch
from l2r.kernels.backend import (
    Saved,
    Score,
    Selected,
    Upstream,
    ends_like,
    route_backward_in_parts,
)

MAX_RANK = 8  # above, the products of torch are faster
MAX_ANCHOR_NUMBERS = 2**18  # N H R up to which a gradient per thread stays in the caches
_NOTHING = torch.empty(0)  # stands for a result nobody asked for


def project(
    x: Tensor, weight: Tensor, gain: Tensor | None, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """Query [T, R] and, with a gain, 1 / rms [T] of every token."""
    if not _compiled(x, weight) or _wide(weight.shape[0], x.shape[0]):
        return cpu_torch.project(x, weight, gain, norm_eps)
    query, rstd = _query_room(x, weight, gain)
    native.forward(native.Stages(x, weight, gain, query=query, rstd=rstd), norm_eps=norm_eps)
    return query, rstd


def score(query: Tensor, anchors: Tensor, rho: Tensor | None, constants: Score) -> Tensor:
    """Logits [T, N]."""
    if rho is not None or not _compiled(query, anchors) or _wide(query.shape[1], query.shape[0]):
        return cpu_torch.score(query, anchors, rho, constants)
    logits = query.new_empty(query.shape[0], anchors.shape[0])
    native.forward(native.Stages(anchors=anchors, query=query, logits=logits), constants)
    return logits


def select(
    logits: Tensor, top_k: int, *, normalize: bool, sums: bool, save: bool = True
) -> Selected:
    """Softmax over experts and the k largest; ``save`` false leaves the log-sum-exp out."""
    if not _compiled(logits):
        return cpu_torch.select(logits, top_k, normalize=normalize, sums=sums, save=save)
    selected = _selection_room(logits, top_k, sums=sums, save=save)
    native.forward(
        native.Stages(logits=logits, **selected._asdict()),
        normalize=normalize,
        sums=sums,
    )
    return selected


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
    """Everything: query, 1 / rms, logits and the selection.

    ``save`` false may leave empty what the backward alone needs: query, 1 / rms, log-sum-exp.
    """
    if not _compiled(x, weight, anchors) or _wide(weight.shape[0], x.shape[0]):
        query, rstd = project(x, weight, gain, norm_eps)
        logits = score(query, anchors, None, constants)
        return query, rstd, logits, select(logits, top_k, normalize=normalize, sums=sums, save=save)
    logits = x.new_empty(x.shape[0], anchors.shape[0])
    selected = _selection_room(logits, top_k, sums=sums, save=save)
    query, rstd = _query_room(x, weight, gain) if save else (_NOTHING, _NOTHING)
    native.forward(
        native.Stages(x, weight, gain, anchors, query, rstd, logits, *selected),
        constants,
        norm_eps=norm_eps,
        normalize=normalize,
        sums=sums,
    )
    return query, rstd, logits, selected


def select_backward(logits: Tensor, selected: Selected, up: Upstream, *, normalize: bool) -> Tensor:
    """Gradient of the logits [T, N], fp32."""
    if not _compiled(logits):
        return cpu_torch.select_backward(logits, selected, up, normalize=normalize)
    grad = torch.empty_like(logits)
    stages = native.Stages(logits=logits, **selected._asdict())
    native.backward(stages, up, native.Grads(logits=grad), normalize=normalize)
    return grad


def score_backward(
    grad_logits: Tensor,
    query: Tensor,
    anchors: Tensor,
    rho: Tensor | None,
    logits: Tensor,
    constants: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, anchors and rho_hat (empty without one)."""
    if (
        rho is not None
        or not _compiled(query, anchors, grad_logits)
        or _many(anchors, query.shape[0])
    ):
        return cpu_torch.score_backward(grad_logits, query, anchors, rho, logits, constants)
    grad_query, grad_anchors = torch.empty_like(query), torch.empty_like(anchors)
    grads = native.Grads(query=grad_query, anchors=grad_anchors)
    stages = native.Stages(anchors=anchors, query=query, logits=logits)
    native.backward(stages, Upstream(grad_logits), grads, constants)
    return grad_query, grad_anchors, query.new_empty(0)


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
    if not _compiled(x, weight, grad_query) or _wide(weight.shape[0], x.shape[0]):
        return cpu_torch.project_backward(grad_query, x, weight, gain, query, rstd, need_x=need_x)
    ends = ends_like(x, weight, gain, need_x)
    stages = native.Stages(x, weight, gain, query=query, rstd=rstd)
    native.backward(stages, Upstream(), native.Grads(None, grad_query, *ends))
    return ends


def route_backward(
    saved: Saved, up: Upstream, *, constants: Score, normalize: bool, need_x: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, W_q, gain and anchors."""
    x, weight, gain, anchors, query, rstd, logits, selected = saved
    if not _compiled(x, weight, anchors) or _many(anchors, x.shape[0]):
        return route_backward_in_parts(
            "cpu",
            saved,
            up,
            constants=constants,
            normalize=normalize,
            need_x=need_x,
        )
    grad_anchors = torch.empty_like(anchors)
    ends = ends_like(x, weight, gain, need_x)
    native.backward(
        native.Stages(x, weight, gain, anchors, query, rstd, logits, *selected),
        up,
        native.Grads(None, None, *ends, grad_anchors),
        constants,
        normalize=normalize,
    )
    return *ends, grad_anchors


def _compiled(*tensors: Tensor) -> bool:
    """Whether the compiled kernels take these tensors, the tokens first."""
    if tensors[0].shape[0] == 0:
        return False
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu:
            return False  # torch then names the device that is wrong
    return native.library() is not None


def _wide(rank: int, tokens: int) -> bool:
    """Where matrix products of torch are faster."""
    return rank > MAX_RANK and tokens > cpu_torch.FEW_TOKENS


def _many(anchors: Tensor, tokens: int) -> bool:
    """The same for the backward, whose sums over tokens must stay in the caches."""
    return anchors.numel() > MAX_ANCHOR_NUMBERS or _wide(anchors.shape[2], tokens)


def _query_room(x: Tensor, weight: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    query = x.new_empty(x.shape[0], weight.shape[0])
    return query, x.new_empty(0 if gain is None else x.shape[0])


def _selection_room(logits: Tensor, top_k: int, *, sums: bool, save: bool) -> Selected:
    tokens, experts = logits.shape
    return Selected(
        logits.new_empty(tokens, top_k),
        logits.new_empty(tokens, top_k, dtype=torch.int64),
        logits.new_empty(tokens) if save else _NOTHING,
        logits.new_empty((2, experts) if sums else (0, 2, experts)) if save else _NOTHING,
    )
