"""The whole router as one registered operation: see ``ops`` for the parts and the rules.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert, K chosen.
"""

from typing import Any

import torch
from torch import Tensor

from l2r.kernels.backend import Saved, Score, Selected, Upstream, ends_like, module
from l2r.kernels.op_common import Grads, Operation, dense, fake_selected, share_of


def _route(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    anchors: Tensor,
    norm_eps: float,
    scoring: str,
    gamma: float,
    beta: float,
    p: float,
    eps: float,
    scale: float,
    top_k: int,
    normalize: bool,
    sums: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logits, weights, indices, log-sum-exp, sums; then query and 1 / rms for the backward."""
    query, rstd, logits, selected = module(backend).route(
        x.contiguous(),
        weight.contiguous(),
        dense(gain),
        anchors.contiguous(),
        norm_eps=norm_eps,
        constants=Score(scoring, gamma, beta, p, eps, scale),
        top_k=top_k,
        normalize=normalize,
        sums=sums,
    )
    return logits, *selected, query, rstd


def _route_fake(
    x: Tensor, weight: Tensor, gain: Tensor | None, anchors: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, top_k, _, sums, _ = rest
    tokens, experts = x.shape[0], anchors.shape[0]
    logits = weight.new_empty(tokens, experts)
    rstd = x.new_empty(0 if gain is None else tokens, dtype=torch.float32)
    query = weight.new_empty(tokens, weight.shape[0])
    return logits, *fake_selected(logits, top_k, sums), query, rstd


def _route_backward(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    anchors: Tensor,
    logits: Tensor,
    weights: Tensor,
    indices: Tensor,
    lse: Tensor,
    query: Tensor,
    rstd: Tensor,
    grad_logits: Tensor | None,
    grad_weights: Tensor | None,
    grad_lse: Tensor | None,
    grad_share: Tensor | None,
    scoring: str,
    gamma: float,
    beta: float,
    p: float,
    eps: float,
    scale: float,
    normalize: bool,
    need_x: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x (empty unless needed), weight, gain (empty without one) and anchors."""
    saved = Saved(
        x.contiguous(),
        weight.contiguous(),
        dense(gain),
        anchors.contiguous(),
        query,
        rstd,
        logits,
        Selected(weights, indices, lse, lse),
    )
    return module(backend).route_backward(
        saved,
        Upstream(*map(dense, (grad_logits, grad_weights, grad_lse, grad_share))),
        constants=Score(scoring, gamma, beta, p, eps, scale),
        normalize=normalize,
        need_x=need_x,
    )


def _route_backward_fake(
    x: Tensor, weight: Tensor, gain: Tensor | None, anchors: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, need_x, _ = rest
    return *ends_like(x, weight, gain, need_x), torch.empty_like(
        anchors, memory_format=torch.contiguous_format
    )


def _route_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, gain, anchors, _, *constants, _, ctx.normalize, _, ctx.backend = inputs
    logits, weights, indices, lse, _, query, rstd = output
    ctx.constants = constants
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(indices, query, rstd)
    ctx.save_for_backward(x, weight, gain, anchors, logits, weights, indices, lse, query, rstd)


def _route_grads(
    run: Any,
    ctx: Any,
    grad_logits: Tensor | None,
    grad_weights: Tensor | None,
    _: Tensor | None,
    grad_lse: Tensor | None,
    grad_sums: Tensor | None,
    *__: Tensor | None,
) -> Grads:
    x, weight, gain, anchors, logits, weights, indices, lse, query, rstd = ctx.saved_tensors
    need_x = ctx.needs_input_grad[0]
    grad_x, grad_weight, grad_gain, grad_anchors = run(
        x,
        weight,
        gain,
        anchors,
        logits,
        weights,
        indices,
        lse,
        query,
        rstd,
        grad_logits,
        grad_weights,
        grad_lse,
        share_of(grad_sums),
        *ctx.constants,
        ctx.normalize,
        need_x,
        ctx.backend,
    )
    return (
        (grad_x if need_x else None),
        grad_weight,
        (None if gain is None else grad_gain),
        grad_anchors,
        *[None] * 11,
    )


route = Operation(
    "l2r::route",
    _route,
    _route_backward,
    fake=_route_fake,
    fake_backward=_route_backward_fake,
    setup=_route_setup,
    backward=_route_grads,
)
