"""A router, or any run of its stages, as one differentiable operation over the backends.

``l2r::route`` is registered with torch.library, with a fake (shapes only) and an analytic
backward that is itself an operation, so torch.compile with fullgraph, activation checkpointing
and CUDA graphs go through; compilers, dispatch modes and tensor subclasses get it. In plain eager
mode an autograd function calls the same bodies, which spares 100 microseconds a call. The
backward has no derivative: second derivatives need ``dispatch.implementation("plain")``.

Absent stages have None among the inputs; a registered operation must return tensors, so results
that are absent come out of it empty.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from l2r.kernels.contract import (
    DEFAULTS,
    Backend,
    Grads,
    Score,
    Tensors,
    Upstream,
    empty_grads,
    empty_results,
    first_input,
)

BACKENDS = {"cpu": "l2r.kernels.cpu", "triton": "l2r.kernels.triton.launch"}


@cache
def backend(name: str) -> Backend:
    """Module of a backend by its name among ``BACKENDS``."""
    module: Any = importlib.import_module(BACKENDS[name])
    return module


class Results(NamedTuple):
    """What the stages make; empty or None where a stage is absent."""

    query: Any = None
    rstd: Any = None
    logits: Any = None
    weights: Any = None
    indices: Any = None
    lse: Any = None


def run(
    name: str,
    watched: bool,
    given: Tensors,
    score: Score = DEFAULTS,
    *,
    top_k: int = 0,
    normalize: bool = False,
) -> Any:
    """Results, by name, of the given stages; differentiable where an input wants gradients.

    ``watched`` says whether a compiler, a mode or a subclass must see the registered operation.
    """
    if not watched and not (torch.is_grad_enabled() and any(map(_wants_gradient, given))):
        # Past the operation: decoding a token feels every microsecond of the call.
        given = _dense(given)
        return backend(name).forward(given, score, top_k=top_k, normalize=normalize, save=False)
    x, weight, gain, anchors, query, _, logits, *_, rho_hat = given
    call = _route if watched else _eager
    tensors = (x, weight, gain, anchors, query, logits, rho_hat)
    return Results(*call(*tensors, score.scoring, list(score[1:]), top_k, normalize, name))


def _wants_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _dense(tensors: Tensors) -> Tensors:
    return Tensors(*[None if tensor is None else tensor.contiguous() for tensor in tensors])


def _results(given: Tensors, done: Tensors, top_k: int) -> Results:
    """The tensors that the stages made, without those that were given."""
    query = None if given.x is None else done.query
    logits = None if given.anchors is None else done.logits
    if not top_k:
        return Results(query, done.rstd, logits)
    return Results(query, done.rstd, logits, done.weights, done.indices, done.lse)


def _given(inputs: Sequence[Any]) -> Tensors:
    x, weight, gain, anchors, query, logits, rho_hat = inputs
    return Tensors(x, weight, gain, anchors, query, logits=logits, rho_hat=rho_hat)


def _forward(*inputs: Any) -> Results:
    *tensors, scoring, constants, top_k, normalize, name = inputs
    given = _dense(_given(tensors))
    score = Score(scoring, *constants)
    done = backend(name).forward(given, score, top_k=top_k, normalize=normalize)
    return _results(given, done, top_k)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    *tensors, ctx.scoring, ctx.constants, top_k, ctx.normalize, ctx.name = inputs
    given, made = _given(tensors), Results(*output)
    ctx.set_materialize_grads(False)
    results = {"logits": given.anchors is not None, "weights": top_k > 0}
    results["query"] = not any(results.values())  # of a projection alone
    fixed = [t for key, t in made._asdict().items() if not results.get(key)]
    ctx.mark_non_differentiable(*[tensor for tensor in fixed if tensor is not None])
    if given.x is not None:
        given = given._replace(query=made.query)
    if given.gain is not None:
        given = given._replace(rstd=made.rstd)
    if given.anchors is not None:
        given = given._replace(logits=made.logits)
    if top_k:
        given = given._replace(weights=made.weights, indices=made.indices, lse=made.lse)
    ctx.save_for_backward(*given)


Run = Callable[..., Sequence[Tensor | None]]


def _input_grads(run_backward: Run, ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Gradients of all inputs of the operation."""
    up = Upstream(grads[0], grads[2], grads[3])
    if all(grad is None for grad in up):
        return (None,) * 12
    tensors, need_x = Tensors(*ctx.saved_tensors), ctx.needs_input_grad[0]
    options = (ctx.scoring, ctx.constants, ctx.normalize, need_x, ctx.name)
    x, weight, gain, anchors, query, logits, rho_hat = run_backward(*tensors, *up, *options)
    scores = tensors.anchors is not None
    if tensors.x is not None:
        return (
            x if need_x else None,
            weight,
            None if tensors.gain is None else gain,
            anchors if scores else None,
            *[None] * 8,
        )
    if scores:
        rho_hat = None if tensors.rho_hat is None else rho_hat
        return (None, None, None, anchors, query, None, rho_hat, *[None] * 5)
    assert tensors.logits is not None and logits is not None
    return (*[None] * 5, logits.to(tensors.logits.dtype), *[None] * 6)


def _backward(*inputs: Any) -> Grads:
    tensors, up = Tensors(*inputs[:11]), Upstream(*inputs[11:14])
    scoring, constants, normalize, need_x, name = inputs[14:]
    if first_input(tensors).shape[0] == 0:
        grads = empty_grads(tensors, need_x=need_x)
        return Grads(*[None if grad is None else grad.zero_() for grad in grads])
    up = Upstream(*[None if grad is None else grad.contiguous() for grad in up])
    score = Score(scoring, *constants)
    call = backend(name).backward
    return call(_dense(tensors), up, score, normalize=normalize, need_x=need_x)


class _Eager(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        made = _forward(*inputs)
        _setup(ctx, inputs, made)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _input_grads(_backward, ctx, grads)


_eager: Callable[..., Any] = _Eager.apply


# --- the same, registered -------------------------------------------------------------------


def _filled(tensors: Sequence[Tensor | None], like: Tensor) -> Any:
    """Empty tensors in the place of None."""
    return tuple(like.new_empty(0) if tensor is None else tensor for tensor in tensors)


@torch.library.custom_op("l2r::route", mutates_args=())
def _route(
    x: Tensor | None,
    weight: Tensor | None,
    gain: Tensor | None,
    anchors: Tensor | None,
    query: Tensor | None,
    logits: Tensor | None,
    rho_hat: Tensor | None,
    scoring: str,
    constants: Sequence[float],
    top_k: int,
    normalize: bool,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (x, weight, gain, anchors, query, logits, rho_hat)
    made = _forward(*tensors, scoring, constants, top_k, normalize, name)
    return _filled(made, first_input(_given(tensors)))


@_route.register_fake
def _(*inputs: Any) -> Any:
    *tensors, _, _, top_k, _, _ = inputs
    given = _given(tensors)
    return _filled(_results(given, empty_results(given, top_k=top_k), top_k), first_input(given))


@torch.library.custom_op("l2r::route_backward", mutates_args=())
def _route_backward(
    x: Tensor | None,
    weight: Tensor | None,
    gain: Tensor | None,
    anchors: Tensor | None,
    query: Tensor | None,
    rstd: Tensor | None,
    logits: Tensor | None,
    weights: Tensor | None,
    indices: Tensor | None,
    lse: Tensor | None,
    rho_hat: Tensor | None,
    up_query: Tensor | None,
    up_logits: Tensor | None,
    up_weights: Tensor | None,
    scoring: str,
    constants: Sequence[float],
    normalize: bool,
    need_x: bool,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = (x, weight, gain, anchors, query, rstd, logits, weights, indices, lse, rho_hat)
    up = (up_query, up_logits, up_weights)
    grads = _backward(*tensors, *up, scoring, constants, normalize, need_x, name)
    return _filled(grads, first_input(Tensors(*tensors)))


@_route_backward.register_fake
def _(*inputs: Any) -> Any:
    tensors = Tensors(*inputs[:11])
    return _filled(empty_grads(tensors, need_x=inputs[-2]), first_input(tensors))


def _through_op(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    return _input_grads(_route_backward, ctx, grads)


_route.register_autograd(_through_op, setup_context=_setup)
