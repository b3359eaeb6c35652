"""A router, or its selection alone, as one differentiable operation over the backends.

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
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from l2r.functional.scoring import ScoreConstants
from l2r.kernels.checks import check_backward, check_indices, check_operation
from l2r.kernels.contract import (
    INPUTS,
    Backend,
    Options,
    Tensors,
    empty_grads,
    empty_results,
    first_input,
)
from l2r.kernels.guard import Guarded
from l2r.kernels.plain_backward import plain_grads
from l2r.kernels.tracing import batched, transformed

_ABSENT = (0, 0, 0)
_RESULTS = INPUTS - 1  # first of them: logits, which may be given
_UP = ("logits", "weights")  # the differentiable results
BACKENDS = {"cpu": "l2r.kernels.cpu", "triton": "l2r.kernels.triton.launch"}


@cache
def backend(name: str) -> Backend:
    """Return a backend by its name among ``BACKENDS``; Triton's falls back to torch code."""
    load: Callable[[], Any] = cache(lambda: importlib.import_module(BACKENDS[name]))
    return Guarded(load, backend("cpu")) if name == "triton" else load()


def run(name: str, watched: bool, given: Tensors, options: Options) -> Tensors:
    """Compute a call; differentiable where an input requires gradients.

    watched: whether a compiler, a mode or a subclass must see the registered operation.
    """
    grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if not (watched or grad):
        return backend(name).forward(_dense(given), options)
    if not watched:
        return _joined(given, _eager(*given[:INPUTS], options, name))
    results = _route(*given[:INPUTS], *_flat(options), name)
    return _joined(given, [_present(tensor) for tensor in results])


def _joined(given: Tensors, results: Sequence[Tensor | None]) -> Tensors:
    """Return inputs and results of a call; given logits are no result."""
    made = Tensors(*given[:_RESULTS], *results)
    return made if given.logits is None else made._replace(logits=given.logits)


def _dense(tensors: Tensors) -> Tensors:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            break
    else:
        return tensors
    return Tensors(*[None if tensor is None else tensor.contiguous() for tensor in tensors])


def _results(done: Tensors, given: Tensors) -> Sequence[Tensor | None]:
    return done[_RESULTS:] if given.logits is None else (None, *done[INPUTS:])


def _forward(given: Tensors, options: Options, name: str) -> Sequence[Tensor | None]:
    given = _dense(given)
    return _results(backend(name).forward(given, options._replace(save=True)), given)


def _setup(
    ctx: Any,
    given: Tensors,
    results: Sequence[Tensor | None],
    outputs: Iterable[Tensor | None],
) -> Tensors:
    """Save what the backward reads, and return it; logits and weights have gradients.

    outputs: what the operation returns, the empty tensors of absent results included.
    """
    kept = _joined(given._replace(routes=None), results)
    differentiable = {id(results[0]), id(kept.weights)}
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(
        *[tensor for tensor in outputs if tensor is not None and id(tensor) not in differentiable]
    )
    ctx.save_for_backward(*kept)
    return kept


def _up(grads: Sequence[Tensor | None]) -> Tensors:
    """Gradients of the differentiable results among those of all results."""
    given = Tensors(*[None] * _RESULTS, *grads)
    return Tensors(logits=given.logits, weights=given.weights)


def _facts(tensors: Tensors) -> list[Any]:
    """Shapes and devices, which must not change between forward and backward."""
    return [None if t is None else (t.shape, t.device) for t in tensors]


def _backward(
    tensors: Tensors, up: Tensors, options: Options, name: str, need_x: bool
) -> Sequence[Tensor | None]:
    check_indices(tensors)
    tensors, options = _dense(tensors), options._replace(save=False, need_x=need_x)
    if first_input(tensors).shape[0] == 0:
        grads = empty_grads(tensors, options)
        return [None if grad is None else grad.zero_() for grad in grads[:INPUTS]]
    return backend(name).backward(tensors, _dense(up), options)[:INPUTS]


def _wanted(
    grads: Sequence[Tensor | None], needed: Iterable[bool], tensors: Tensors
) -> list[Tensor | None]:
    """Gradients that autograd asked for, in the dtypes of the inputs."""
    *others, logits = grads
    if logits is not None and tensors.logits is not None:
        logits = logits.to(tensors.logits.dtype)
    return [grad if need else None for grad, need in zip((*others, logits), needed, strict=True)]


def _beyond_fused(up: Tensors) -> bool:
    """Tell whether gradients need gradients, or are many at once, which the backends cannot do."""
    return torch.is_grad_enabled() or transformed() or batched(up.logits, up.weights)


class _Eager(Function):
    """Autograd function of calls that ``dispatch`` has checked; backward checks shapes again."""

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Any:
        *inputs, options, name = flat
        ctx.options, ctx.name = options, name
        given = Tensors(*inputs)
        results = _forward(given, options, name)
        ctx.given = _facts(_setup(ctx, given, results, results))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needed, up = ctx.needs_input_grad[:INPUTS], _up(grads)
        if up.logits is None and up.weights is None:
            return (*[None] * INPUTS, None, None)
        tensors = Tensors(*ctx.saved_tensors)
        if _facts(tensors) != ctx.given:  # data that another library took away
            check_backward(tensors, up, ctx.options, ctx.name)
        if _beyond_fused(up):
            return (*plain_grads(tensors, up, ctx.options, needed), None, None)
        own = _backward(tensors, up, ctx.options, ctx.name, needed[0])
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
    return Tensors(*inputs), _unflattened(scoring, constants, top_k, normalize), name


def _backward_arguments(flat: tuple[Any, ...]) -> tuple[Tensors, Tensors, Options, str, bool]:
    *tensors, logits, weights, scoring, constants, top_k, normalize, name, need_x = flat
    options = _unflattened(scoring, constants, top_k, normalize)
    return Tensors(*tensors), Tensors(logits=logits, weights=weights), options, name, need_x


def _filled(tensors: Iterable[Tensor | None], like: Tensor) -> Any:
    """Return the tensors, with an empty one in place of None."""
    return tuple(like.new_empty(_ABSENT) if tensor is None else tensor for tensor in tensors)


def _present(tensor: Tensor) -> Tensor | None:
    """Return a result of a registered operation, None in place of an empty one."""
    return None if tensor.dim() == len(_ABSENT) else tensor


def _schema(inputs: Iterable[str], more: str, results: Iterable[str]) -> str:
    tensors = ", ".join(f"Tensor? {name}" for name in inputs)
    options = "str scoring, float[] constants, int top_k, bool normalize, str backend"
    return f"({tensors}, {options}{more}) -> ({', '.join(['Tensor' for _ in results])})"


@torch.library.custom_op(
    "l2r::route",
    mutates_args=(),
    schema=_schema(Tensors._fields[:INPUTS], "", Tensors._fields[_RESULTS:]),
)
def _route(*flat: Any) -> Any:
    given, options, name = _forward_arguments(flat)
    check_operation(given, options, name)
    return _filled(_forward(given, options, name), first_input(given))


@_route.register_fake
def _(*flat: Any) -> Any:
    given, options, name = _forward_arguments(flat)
    check_operation(given, options, name)
    return _filled(_results(empty_results(given, options), given), first_input(given))


@torch.library.custom_op(
    "l2r::route_backward",
    mutates_args=(),
    schema=_schema(
        (*Tensors._fields, *[f"up_{name}" for name in _UP]),
        ", bool need_x",
        Tensors._fields[:INPUTS],
    ),
)
def _route_backward(*flat: Any) -> Any:
    tensors, up, options, name, need_x = _backward_arguments(flat)
    check_backward(tensors, up, options, name)
    return _filled(_backward(tensors, up, options, name, need_x), first_input(tensors))


@_route_backward.register_fake
def _(*flat: Any) -> Any:
    tensors, up, options, name, need_x = _backward_arguments(flat)
    check_backward(tensors, up, options, name)
    grads = empty_grads(tensors, options._replace(need_x=need_x))
    return _filled(grads[:INPUTS], first_input(tensors))


def _registered_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *given, scoring, constants, top_k, normalize, name = inputs
    ctx.flat = scoring, constants, top_k, normalize, name
    _setup(ctx, Tensors(*given), [_present(tensor) for tensor in output], output)


def _registered_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    needed, up = ctx.needs_input_grad[:INPUTS], _up(grads)
    rest = [None] * len(ctx.flat)
    if up.logits is None and up.weights is None:
        return (*[None] * INPUTS, *rest)
    tensors = Tensors(*ctx.saved_tensors)
    if _beyond_fused(up):
        return (*plain_grads(tensors, up, _unflattened(*ctx.flat[:-1]), needed), *rest)
    own = _route_backward(*tensors, up.logits, up.weights, *ctx.flat, needed[0])
    return (*_wanted(own, needed, tensors), *rest)


_route.register_autograd(_registered_backward, setup_context=_registered_setup)
