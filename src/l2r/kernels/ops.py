"""The fused operations, registered with torch.library: one schema, two backends.

Each operation takes plain tensors and runs ``triton_backend`` on a GPU or ``cpu`` on a CPU. It has
a fake (shapes only) and an analytic backward, itself an operation, so torch.compile with
fullgraph, activation checkpointing and CUDA graphs go through. The backward has no derivative:
second derivatives need ``with l2r.kernels.dispatch.implementation("plain")``.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert, K chosen.
"""

from typing import Any

import torch
from torch import Tensor

from l2r.kernels.backend import Score, Selected, Upstream, ends_like, module
from l2r.kernels.op_common import Grads, Operation, dense, fake_selected, share_of

# --- query -----------------------------------------------------------------------------------


def _routing_query(
    x: Tensor, weight: Tensor, gain: Tensor | None, norm_eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Query [T, R] in the dtype of ``weight`` and 1 / rms [T] (empty without a gain)."""
    return module(backend).project(x.contiguous(), weight.contiguous(), dense(gain), norm_eps)


def _routing_query_fake(
    x: Tensor, weight: Tensor, gain: Tensor | None, norm_eps: float, backend: str
) -> tuple[Tensor, Tensor]:
    tokens = x.shape[0]
    rstd = x.new_empty(0 if gain is None else tokens, dtype=torch.float32)
    return weight.new_empty(tokens, weight.shape[0]), rstd


def _routing_query_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    query: Tensor,
    rstd: Tensor,
    need_x: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (empty unless needed), weight and gain (empty without one)."""
    return module(backend).project_backward(
        grad.contiguous(),
        x.contiguous(),
        weight.contiguous(),
        dense(gain),
        query,
        rstd,
        need_x=need_x,
    )


def _routing_query_backward_fake(
    grad: Tensor, x: Tensor, weight: Tensor, gain: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, need_x, _ = rest
    return ends_like(x, weight, gain, need_x)


def _routing_query_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, gain, _, ctx.backend = inputs
    query, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(x, weight, gain, query, rstd)


def _routing_query_grads(run: Any, ctx: Any, grad: Tensor, _: Tensor | None) -> Grads:
    x, weight, gain, query, rstd = ctx.saved_tensors
    need_x = ctx.needs_input_grad[0]
    grad_x, grad_weight, grad_gain = run(grad, x, weight, gain, query, rstd, need_x, ctx.backend)
    grad_gain = None if gain is None else grad_gain
    return (grad_x if need_x else None), grad_weight, grad_gain, None, None


routing_query = Operation(
    "l2r::routing_query",
    _routing_query,
    _routing_query_backward,
    fake=_routing_query_fake,
    fake_backward=_routing_query_backward_fake,
    setup=_routing_query_setup,
    backward=_routing_query_grads,
)


# --- logits ----------------------------------------------------------------------------------


def _anchor_logits(
    query: Tensor,
    anchors: Tensor,
    rho_hat: Tensor | None,
    scoring: str,
    gamma: float,
    beta: float,
    p: float,
    eps: float,
    scale: float,
    backend: str,
) -> Tensor:
    """Pooled logits [T, N]."""
    constants = Score(scoring, gamma, beta, p, eps, scale)
    return module(backend).score(
        query.contiguous(), anchors.contiguous(), dense(rho_hat), constants
    )


def _anchor_logits_fake(query: Tensor, anchors: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[0], anchors.shape[0])


def _anchor_logits_backward(
    grad: Tensor,
    query: Tensor,
    anchors: Tensor,
    rho_hat: Tensor | None,
    logits: Tensor,
    scoring: str,
    gamma: float,
    beta: float,
    p: float,
    eps: float,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, anchors and rho_hat (empty without one)."""
    constants = Score(scoring, gamma, beta, p, eps, scale)
    return module(backend).score_backward(
        grad.contiguous(),
        query.contiguous(),
        anchors.contiguous(),
        dense(rho_hat),
        logits,
        constants,
    )


def _anchor_logits_backward_fake(
    grad: Tensor, query: Tensor, anchors: Tensor, rho_hat: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        torch.empty_like(anchors, memory_format=torch.contiguous_format),
        query.new_empty(0 if rho_hat is None else query.shape[0]),
    )


def _anchor_logits_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, anchors, rho_hat, *ctx.constants = inputs
    ctx.save_for_backward(query, anchors, rho_hat, output)


def _anchor_logits_grads(run: Any, ctx: Any, grad: Tensor) -> Grads:
    query, anchors, rho_hat, logits = ctx.saved_tensors
    grad_query, grad_anchors, grad_rho = run(grad, query, anchors, rho_hat, logits, *ctx.constants)
    return grad_query, grad_anchors, (None if rho_hat is None else grad_rho), *[None] * 7


anchor_logits = Operation(
    "l2r::anchor_logits",
    _anchor_logits,
    _anchor_logits_backward,
    fake=_anchor_logits_fake,
    fake_backward=_anchor_logits_backward_fake,
    setup=_anchor_logits_setup,
    backward=_anchor_logits_grads,
)


# --- selection -------------------------------------------------------------------------------


def _select(
    logits: Tensor, top_k: int, normalize: bool, sums: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weights and indices [T, K], log-sum-exp [T], sums [2, N] of probabilities and choices."""
    return tuple(module(backend).select(logits.contiguous(), top_k, normalize=normalize, sums=sums))


def _select_fake(
    logits: Tensor, top_k: int, normalize: bool, sums: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_selected(logits, top_k, sums)


def _select_backward(
    logits: Tensor,
    weights: Tensor,
    indices: Tensor,
    lse: Tensor,
    grad_logits: Tensor | None,
    grad_weights: Tensor | None,
    grad_lse: Tensor | None,
    grad_share: Tensor | None,
    normalize: bool,
    backend: str,
) -> Tensor:
    """Gradient of the logits, fp32."""
    return module(backend).select_backward(
        logits.contiguous(),
        Selected(weights, indices, lse, lse),
        Upstream(*map(dense, (grad_logits, grad_weights, grad_lse, grad_share))),
        normalize=normalize,
    )


def _select_backward_fake(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _select_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, ctx.normalize, _, ctx.backend = inputs
    weights, indices, lse, _ = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(indices)
    ctx.save_for_backward(logits, weights, indices, lse)


def _select_grads(
    run: Any,
    ctx: Any,
    grad_weights: Tensor | None,
    _: Tensor | None,
    grad_lse: Tensor | None,
    grad_sums: Tensor | None,
) -> Grads:
    logits, weights, indices, lse = ctx.saved_tensors
    grad = run(
        logits,
        weights,
        indices,
        lse,
        None,
        grad_weights,
        grad_lse,
        share_of(grad_sums),
        ctx.normalize,
        ctx.backend,
    )
    return grad.to(logits.dtype), None, None, None, None


select = Operation(
    "l2r::select",
    _select,
    _select_backward,
    fake=_select_fake,
    fake_backward=_select_backward_fake,
    setup=_select_setup,
    backward=_select_grads,
)
