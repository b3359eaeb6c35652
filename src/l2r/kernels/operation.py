"""A router, or any run of its stages, as one differentiable operation over the backends.

``l2r::route`` is registered with torch.library, with a fake (shapes only) and an analytic
backward that is itself an operation, so that torch.compile with fullgraph, activation
checkpointing and CUDA graphs work. Compilers, dispatch modes and tensor subclasses get it. In
plain eager mode an autograd function calls the same bodies, which saves 100 microseconds a call.
The backward has no derivative; one with ``create_graph`` is plain code's (plain_backward.py).

A registered operation takes and returns tensors and plain numbers only: ``_flat`` and
``_unflattened`` convert options, and an absent result is an empty tensor with more dimensions than
any result.
"""

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function

from l2r.kernels.checks import check_backward, check_indices, check_operation
from l2r.kernels.contract import (
    Backend,
    Inputs,
    Options,
    Results,
    ScoreConstants,
    Tensors,
    all_tensors,
    empty_grads,
    empty_results,
    first_input,
    inputs_of,
    results_of,
)
from l2r.kernels.guard import Guarded
from l2r.kernels.plain_backward import plain_grads
from l2r.kernels.tracing import batched, transformed

_ABSENT = (0, 0, 0)
BACKENDS = {"cpu": "l2r.kernels.cpu", "triton": "l2r.kernels.triton.launch"}


@cache
def backend(name: str) -> Backend:
    """Return a backend by its name among ``BACKENDS``; Triton's falls back to torch code."""
    load: Callable[[], Any] = cache(lambda: importlib.import_module(BACKENDS[name]))
    return Guarded(load, backend("cpu")) if name == "triton" else load()


class Upstream(NamedTuple):
    """Gradients of the differentiable results."""

    query: Tensor | None
    logits: Tensor | None
    weights: Tensor | None


def run(name: str, watched: bool, given: Tensors, options: Options) -> Tensors:
    """Compute the given stages; differentiable where an input requires gradients.

    watched: whether a compiler, a mode or a subclass must see the registered operation.
    """
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if not (watched or grad):
        # Skip the registered operation: its overhead is a large part of a decoding step.
        return backend(name).forward(_dense(given), options)
    inputs = inputs_of(given)
    if not watched:
        return all_tensors(inputs, Results(*_eager(*inputs, options, name)))
    results = _route(*inputs, *_flat(options), name)
    return all_tensors(inputs, Results(*[_present(tensor) for tensor in results]))


def _dense(tensors: Tensors) -> Tensors:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            break
    else:
        return tensors
    return Tensors(*[None if tensor is None else tensor.contiguous() for tensor in tensors])


def _forward(given: Tensors, options: Options, name: str) -> Results:
    given = _dense(given)
    return results_of(backend(name).forward(given, options._replace(save=True)), given)


def _setup(ctx: Any, inputs: Inputs, results: Results, outputs: Iterable[Tensor | None]) -> None:
    """Save what the backward reads; logits, or a query that is the last result, have gradients.

    outputs: what the operation returns, the empty tensors of absent results included.
    """
    last = results.query if results.logits is None else results.logits
    differentiable = {id(last), id(results.weights)}
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(
        *[tensor for tensor in outputs if tensor is not None and id(tensor) not in differentiable]
    )
    ctx.save_for_backward(*all_tensors(inputs._replace(routes=None), results))


def _facts(tensors: Tensors) -> list[Any]:
    """Shapes and devices, which must not change between forward and backward."""
    return [None if t is None else (t.shape, t.device) for t in tensors]


def _backward(
    tensors: Tensors, upstream: Upstream, options: Options, name: str, need_x: bool
) -> Inputs:
    up = Tensors(query=upstream.query, logits=upstream.logits, weights=upstream.weights)
    check_indices(tensors)
    tensors, options = _dense(tensors), options._replace(save=False, need_x=need_x)
    if first_input(tensors).shape[0] == 0:
        grads = empty_grads(tensors, options)
        return Inputs(*[None if grad is None else grad.zero_() for grad in inputs_of(grads)])
    return inputs_of(backend(name).backward(tensors, _dense(up), options))


def _wanted(grads: Inputs, needed: Iterable[bool], tensors: Tensors) -> list[Tensor | None]:
    """Gradients that autograd asked for, in the dtypes of the inputs."""
    if grads.logits is not None and tensors.logits is not None:
        grads = grads._replace(logits=grads.logits.to(tensors.logits.dtype))
    return [grad if need else None for grad, need in zip(grads, needed, strict=True)]


def _beyond_fused(up: Upstream) -> bool:
    """Whether gradients need gradients, or are many at once, which the backends cannot do."""
    return torch.is_grad_enabled() or transformed() or batched(*up)


class _Eager(Function):
    """Autograd function of calls that ``dispatch`` has checked; backward checks shapes again."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Any:
        *inputs, options, name = flat
        ctx.options, ctx.name = options, name
        given = Inputs(*inputs)
        results = _forward(all_tensors(given), options, name)
        _setup(ctx, given, results, results)
        ctx.given = _facts(all_tensors(given._replace(routes=None), results))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        results, needed = Results(*grads), ctx.needs_input_grad[: len(Inputs._fields)]
        up = Upstream(results.query, results.logits, results.weights)
        if up == (None, None, None):
            return (*[None] * len(needed), None, None)
        tensors = Tensors(*ctx.saved_tensors)
        if _facts(tensors) != ctx.given:  # data that another library took away
            check_backward(tensors, Tensors(**up._asdict()), ctx.options, ctx.name)
        if _beyond_fused(up):
            return (*plain_grads(tensors, results, ctx.options, needed), None, None)
        own = _backward(tensors, up, ctx.options, ctx.name, bool(Inputs(*needed).x))
        return (*_wanted(own, needed, tensors), None, None)


_eager: Callable[..., Any] = _Eager.apply


# --- the same, registered -------------------------------------------------------------------


def _flat(options: Options) -> tuple[str, list[float], int, bool]:
    """Options as types of a registered operation."""
    score = options.score
    return score.scoring, list(score[1:]), options.top_k, options.normalize


def _unflattened(scoring: Any, constants: list[float], top_k: int, normalize: bool) -> Options:
    """Options from ``_flat``; raise ValueError for another number of constants."""
    if len(constants) != len(ScoreConstants._fields) - 1:
        raise ValueError(
            f"constants must be {len(ScoreConstants._fields) - 1} numbers; got {constants}"
        )
    return Options(ScoreConstants(scoring, *constants), top_k, normalize, save=True)


def _forward_arguments(flat: tuple[Any, ...]) -> tuple[Tensors, Options, str]:
    *inputs, scoring, constants, top_k, normalize, name = flat
    options = _unflattened(scoring, constants, top_k, normalize)
    return all_tensors(Inputs(*inputs)), options, name


def _backward_arguments(flat: tuple[Any, ...]) -> tuple[Tensors, Upstream, Options, str, bool]:
    *tensors, query, logits, weights, scoring, constants, top_k, normalize, name, need_x = flat
    options = _unflattened(scoring, constants, top_k, normalize)
    return Tensors(*tensors), Upstream(query, logits, weights), options, name, need_x


def _filled(tensors: Iterable[Tensor | None], like: Tensor) -> Any:
    """The tensors, with an empty one in place of None."""
    return tuple(like.new_empty(_ABSENT) if tensor is None else tensor for tensor in tensors)


def _present(tensor: Tensor) -> Tensor | None:
    """A result of a registered operation, None in place of an empty one."""
    return None if tensor.dim() == len(_ABSENT) else tensor


def _schema(inputs: Iterable[str], more: str, results: Iterable[str]) -> str:
    tensors = ", ".join(f"Tensor? {name}" for name in inputs)
    options = "str scoring, float[] constants, int top_k, bool normalize, str backend"
    return f"({tensors}, {options}{more}) -> ({', '.join(['Tensor' for _ in results])})"


@torch.library.custom_op(
    "l2r::route", mutates_args=(), schema=_schema(Inputs._fields, "", Results._fields)
)
def _route(*flat: Any) -> Any:
    given, options, name = _forward_arguments(flat)
    check_operation(given, options, name)
    return _filled(_forward(given, options, name), first_input(given))


@_route.register_fake
def _(*flat: Any) -> Any:
    given, options, name = _forward_arguments(flat)
    check_operation(given, options, name)
    return _filled(results_of(empty_results(given, options), given), first_input(given))


@torch.library.custom_op(
    "l2r::route_backward",
    mutates_args=(),
    schema=_schema(
        (*Tensors._fields, *[f"up_{name}" for name in Upstream._fields]),
        ", bool need_x",
        Inputs._fields,
    ),
)
def _route_backward(*flat: Any) -> Any:
    tensors, up, options, name, need_x = _backward_arguments(flat)
    check_backward(tensors, Tensors(**up._asdict()), options, name)
    return _filled(_backward(tensors, up, options, name, need_x), first_input(tensors))


@_route_backward.register_fake
def _(*flat: Any) -> Any:
    tensors, up, options, name, need_x = _backward_arguments(flat)
    check_backward(tensors, Tensors(**up._asdict()), options, name)
    grads = empty_grads(tensors, options._replace(need_x=need_x))
    return _filled(inputs_of(grads), first_input(tensors))


def _registered_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, scoring, constants, top_k, normalize, name = inputs
    ctx.flat = scoring, constants, top_k, normalize, name
    _setup(ctx, Inputs(*given), Results(*[_present(tensor) for tensor in output]), output)


def _registered_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    results, needed = Results(*grads), ctx.needs_input_grad[: len(Inputs._fields)]
    up = Upstream(results.query, results.logits, results.weights)
    rest = [None] * len(ctx.flat)
    if up == (None, None, None):
        return (*[None] * len(needed), *rest)
    tensors = Tensors(*ctx.saved_tensors)
    if _beyond_fused(up):
        options = _unflattened(*ctx.flat[:-1])
        return (*plain_grads(tensors, results, options, needed), *rest)
    own = Inputs(*_route_backward(*tensors, *up, *ctx.flat, Inputs(*needed).x))
    return (*_wanted(own, needed, tensors), *rest)


_route.register_autograd(_registered_backward, setup_context=_registered_setup)
