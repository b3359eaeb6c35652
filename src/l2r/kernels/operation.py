"""A router, or any run of its stages, as one differentiable operation over the backends.

``l2r::route`` is registered with torch.library, with a fake (shapes only) and an analytic
backward that is itself an operation, so torch.compile with fullgraph, activation checkpointing
and CUDA graphs go through; compilers, dispatch modes and tensor subclasses get it. In plain eager
mode an autograd function calls the same bodies, which spares 100 microseconds a call. The
backward has no derivative: second derivatives need ``dispatch.implementation("plain")``.

Absent stages have None among the inputs. A registered operation must return tensors, so what is
absent comes out of it empty, with more dimensions than any result.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from l2r.kernels.checks import check_backward, check_indices, check_operation
from l2r.kernels.contract import (
    GIVEN,
    MADE,
    Backend,
    Options,
    Score,
    Tensors,
    empty_grads,
    empty_results,
    first_input,
)
from l2r.kernels.guard import Guarded

_ABSENT = (0, 0, 0)
_ALL = len(Tensors._fields)
_UP = ("up_query", "up_logits", "up_weights")
BACKENDS = {"cpu": "l2r.kernels.cpu", "triton": "l2r.kernels.triton.launch"}


@cache
def backend(name: str) -> Backend:
    """A backend by its name among ``BACKENDS``; Triton's gives way to torch code where it fails."""
    load: Callable[[], Any] = cache(lambda: importlib.import_module(BACKENDS[name]))
    return Guarded(load, backend("cpu")) if name == "triton" else load()


def run(name: str, watched: bool, given: Tensors, options: Options) -> Any:
    """Results of the given stages; differentiable where an input wants gradients.

    ``watched`` says whether a compiler, a mode or a subclass must see the registered operation.
    """
    inputs = given[:GIVEN]
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if not (watched or grad):
        # Past the operation: decoding a token feels every microsecond of the call.
        return backend(name).forward(_dense(given), options)
    score, top_k, normalize, *_ = options
    call = _route if watched else _eager
    made = call(*inputs, score.scoring, list(score[1:]), top_k, normalize, name)
    return Tensors(*given[:MADE], *made)


def _dense(tensors: Tensors) -> Tensors:
    return Tensors(*[None if tensor is None else tensor.contiguous() for tensor in tensors])


def _made(given: Tensors, done: Tensors) -> tuple[Tensor | None, ...]:
    """What the stages made, None for what was given."""
    pairs = zip(given[MADE:], done[MADE:], strict=True)
    return tuple([made if before is None else None for before, made in pairs])


def _forward(*inputs: Any) -> tuple[Tensor | None, ...]:
    scoring, constants, top_k, normalize, name = inputs[GIVEN:]
    given = Tensors(*inputs[:GIVEN])
    check_operation(given, inputs[GIVEN:])
    given = _dense(given)
    options = Options(Score(scoring, *constants), top_k, normalize, save=True)
    return _made(given, backend(name).forward(given, options))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    given, ctx.options = Tensors(*inputs[:GIVEN]), inputs[GIVEN:]
    made = [None if tensor is None or tensor.dim() == len(_ABSENT) else tensor for tensor in output]
    query, logits, _, weights, *_ = made
    results = {id(query if logits is None else logits), id(weights)}
    ctx.set_materialize_grads(False)
    fixed = [tensor for tensor in output if tensor is not None and id(tensor) not in results]
    ctx.mark_non_differentiable(*fixed)
    pairs = zip(given[MADE:], made, strict=True)
    known = [after if before is None else before for before, after in pairs]
    ctx.save_for_backward(*given[:MADE], *known)


def _input_grads(run_backward: Callable[..., Any], ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Gradients of all inputs of the operation."""
    query, logits, _, weights, *_ = grads
    rest = [None] * len(ctx.options)
    if query is None and logits is None and weights is None:
        return (*[None] * GIVEN, *rest)
    needed, tensors = ctx.needs_input_grad[:GIVEN], ctx.saved_tensors
    found = run_backward(*tensors, query, logits, weights, *ctx.options, needed[0])
    found = [grad if need else None for grad, need in zip(found, needed, strict=True)]
    if found[-1] is not None:  # of given logits
        found[-1] = found[-1].to(tensors[GIVEN - 1].dtype)
    return (*found, *rest)


def _backward(*inputs: Any) -> tuple[Tensor | None, ...]:
    query, logits, weights, scoring, constants, top_k, normalize, name, need_x = inputs[_ALL:]
    tensors, up = Tensors(*inputs[:_ALL]), Tensors(query=query, logits=logits, weights=weights)
    check_backward(tensors, up, inputs[_ALL + len(_UP) : -1])
    check_indices(tensors)
    tensors = _dense(tensors)
    options = Options(Score(scoring, *constants), top_k, normalize, need_x=need_x)
    if first_input(tensors).shape[0] == 0:
        grads = empty_grads(tensors, options)
        return tuple([None if grad is None else grad.zero_() for grad in grads[:GIVEN]])
    return backend(name).backward(tensors, _dense(up), options)[:GIVEN]


class _Eager(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        made = _forward(*inputs)
        _setup(ctx, inputs, made)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _input_grads(_backward, ctx, grads)


_eager: Callable[..., Any] = _Eager.apply


# --- the same, registered -------------------------------------------------------------------


def _filled(tensors: Sequence[Tensor | None], like: Tensor) -> Any:
    """Tensors that count as absent in the place of None."""
    return tuple(like.new_empty(_ABSENT) if tensor is None else tensor for tensor in tensors)


def _schema(inputs: Sequence[str], more: str, results: int) -> str:
    tensors = ", ".join(f"Tensor? {name}" for name in inputs)
    options = "str scoring, float[] constants, int top_k, bool normalize, str backend"
    return f"({tensors}, {options}{more}) -> ({', '.join(['Tensor'] * results)})"


@torch.library.custom_op(
    "l2r::route", mutates_args=(), schema=_schema(Tensors._fields[:GIVEN], "", 6)
)
def _route(*inputs: Any) -> Any:
    return _filled(_forward(*inputs), first_input(Tensors(*inputs[:GIVEN])))


@_route.register_fake
def _(*inputs: Any) -> Any:
    given, options = Tensors(*inputs[:GIVEN]), Options(top_k=inputs[-3], save=True)
    check_operation(given, inputs[GIVEN:])
    return _filled(_made(given, empty_results(given, options)), first_input(given))


@torch.library.custom_op(
    "l2r::route_backward",
    mutates_args=(),
    schema=_schema((*Tensors._fields, *_UP), ", bool need_x", 7),
)
def _route_backward(*inputs: Any) -> Any:
    return _filled(_backward(*inputs), first_input(Tensors(*inputs[:_ALL])))


@_route_backward.register_fake
def _(*inputs: Any) -> Any:
    tensors, (query, logits, weights) = Tensors(*inputs[:_ALL]), inputs[_ALL : _ALL + len(_UP)]
    up = Tensors(query=query, logits=logits, weights=weights)
    check_backward(tensors, up, inputs[_ALL + len(_UP) : -1])
    grads = empty_grads(tensors, Options(need_x=inputs[-1]))
    return _filled(grads[:GIVEN], first_input(tensors))


def _through_op(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    return _input_grads(_route_backward, ctx, grads)


_route.register_autograd(_through_op, setup_context=_setup)
