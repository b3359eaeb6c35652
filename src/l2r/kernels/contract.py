"""The backend interface: tensors, options, two functions.

A backend is a module with the functions of ``Backend``. Both compute a call in stages, project
(x to query), score (query to logits) and select (logits to weights). Any run of neighboring
stages may be called; the tensors of the others are None. Tensors are used by name, never by
position.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert, K chosen.
"""

from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Scoring = Literal["dot", "cosine", "sips"]
SCORINGS: dict[str, int] = {"dot": 0, "cosine": 1, "sips": 2}  # as numbered in the kernels


class ScoreConstants(NamedTuple):
    """Constants of a router's logits, in the order of the structure in ``native/router.h``.

    scoring: kind of the score. gamma, beta, p: constants of phi and psi. eps: smallest length
    divided by. scale: factor of the pooled logits, one over the temperature. norm_eps: constant
    of the RMSNorm before the projection.
    """

    scoring: Scoring = "dot"
    gamma: float = 1.0
    beta: float = 1.0
    p: float = 4.0
    eps: float = 1e-6
    scale: float = 1.0
    norm_eps: float = 1e-5


DEFAULTS = ScoreConstants()


class Options(NamedTuple):
    """Non-tensor arguments of a call.

    score: constants of the logits. top_k: number of experts to select; 0 for no selection.
    normalize: whether the weights of a token sum to 1. save: whether a forward keeps what only a
    backward needs. need_x: whether a backward computes the gradient of x.
    """

    score: ScoreConstants = DEFAULTS
    top_k: int = 0
    normalize: bool = False
    save: bool = False
    need_x: bool = False


class Tensors(NamedTuple):
    """Inputs and results of a call, or gradients of some, in the order of the C structure.

    project: x [T, D], weight [R, D], maybe gain [D] to query [T, R] and, with a gain, rstd [T],
    one over the RMS of every token. score: query, anchors [N, H, R], maybe rho_hat [T] to logits
    [T, N]. select: logits to weights and indices [T, K] and lse [T], the log-sum-exp of the logits.
    With routes [T, K], int64, these are the indices; only tokens whose first route is negative
    choose for themselves.

    ``Inputs`` and ``Results`` name those that may be one or the other; query and logits are both.
    """

    x: Tensor | None = None
    weight: Tensor | None = None
    gain: Tensor | None = None
    anchors: Tensor | None = None
    rho_hat: Tensor | None = None
    query: Tensor | None = None
    logits: Tensor | None = None
    routes: Tensor | None = None
    rstd: Tensor | None = None
    weights: Tensor | None = None
    indices: Tensor | None = None
    lse: Tensor | None = None


class Inputs(NamedTuple):
    """Tensors that a call may be given, or their gradients."""

    x: Tensor | None = None
    weight: Tensor | None = None
    gain: Tensor | None = None
    anchors: Tensor | None = None
    rho_hat: Tensor | None = None
    query: Tensor | None = None
    logits: Tensor | None = None
    routes: Tensor | None = None


class Results(NamedTuple):
    """Tensors that a call may compute; None where its stage is absent."""

    query: Tensor | None = None
    logits: Tensor | None = None
    rstd: Tensor | None = None
    weights: Tensor | None = None
    indices: Tensor | None = None
    lse: Tensor | None = None


NO_RESULTS = Results()


class Sizes(NamedTuple):
    """Sizes of a call, 0 where a stage is absent; under a compiler they may be symbols."""

    tokens: Any
    hidden: Any = 0
    rank: Any = 0
    experts: Any = 0
    heads: Any = 0


@runtime_checkable
class Backend(Protocol):
    """Functions of a backend's module. Tensors are contiguous, on one device; T may be 0."""

    def forward(self, given: Tensors, options: Options) -> Tensors:
        """Return the given tensors together with the results of their stages."""
        ...

    def backward(self, tensors: Tensors, up: Tensors, options: Options) -> Tensors:
        """Return the gradients of the inputs, from all tensors of the forward; T is at least 1.

        ``up``: gradients of the logits and weights, or of a query that is the last result. The
        gradient of given logits is fp32 whatever their dtype.
        """
        ...


# Functions, not methods, which torch.compile cannot trace where jaxtyping checks them.
def inputs_of(tensors: Tensors) -> Inputs:
    """Return the inputs among the tensors of a call, or among their gradients."""
    t = tensors
    return Inputs(t.x, t.weight, t.gain, t.anchors, t.rho_hat, t.query, t.logits, t.routes)


def results_of(done: Tensors, given: Tensors) -> Results:
    """Return the results of a call, without a query or logits that it was given."""
    query = done.query if given.query is None else None
    logits = done.logits if given.logits is None else None
    return Results(query, logits, done.rstd, done.weights, done.indices, done.lse)


def all_tensors(inputs: Inputs, results: Results = NO_RESULTS) -> Tensors:
    """Return all tensors of a call."""
    return Tensors(
        x=inputs.x,
        weight=inputs.weight,
        gain=inputs.gain,
        anchors=inputs.anchors,
        rho_hat=inputs.rho_hat,
        query=results.query if inputs.query is None else inputs.query,
        logits=results.logits if inputs.logits is None else inputs.logits,
        routes=inputs.routes,
        rstd=results.rstd,
        weights=results.weights,
        indices=results.indices,
        lse=results.lse,
    )


def first_input(tensors: Tensors) -> Tensor:
    """Return the input of the first stage; its rows are the tokens."""
    if tensors.x is not None:
        return tensors.x
    tensor = tensors.query if tensors.anchors is not None else tensors.logits
    assert tensor is not None
    return tensor


def sizes_of(tensors: Tensors) -> Sizes:
    """Return the sizes of a call."""
    hidden = rank = experts = heads = 0
    if tensors.x is not None:
        hidden = tensors.x.shape[1]
    if tensors.anchors is not None:
        experts, heads, rank = tensors.anchors.shape
    elif tensors.weight is not None:
        rank = tensors.weight.shape[0]
    elif tensors.logits is not None:
        experts = tensors.logits.shape[1]
    return Sizes(first_input(tensors).shape[0], hidden, rank, experts, heads)


def empty(*shape: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate memory for a result (sizes may be symbols); tests fill it with NaN."""
    if dtype is None or dtype is like.dtype:
        return like.new_empty(*shape)  # half a microsecond less
    return like.new_empty(*shape, dtype=dtype)


def empty_results(given: Tensors, options: Options) -> Tensors:
    """Allocate the results of a call; returned together with what was given."""
    x, weight, gain, anchors, rho_hat = (
        given.x,
        given.weight,
        given.gain,
        given.anchors,
        given.rho_hat,
    )
    query, logits, rstd, weights, indices, lse = given.query, given.logits, None, None, None, None
    tokens, save, top_k = first_input(given).shape[0], options.save, options.top_k
    if weight is not None and (save or anchors is None):
        query = empty(tokens, weight.shape[0], like=weight)
        if gain is not None and save:
            rstd = empty(tokens, like=weight, dtype=torch.float32)
    if anchors is not None:
        logits = empty(tokens, anchors.shape[0], like=anchors)
    if top_k:
        assert logits is not None
        weights = empty(tokens, top_k, like=logits, dtype=torch.float32)
        indices = empty(tokens, top_k, like=logits, dtype=torch.int64)
        lse = empty(tokens, like=logits, dtype=torch.float32) if save else None
    inputs = (x, weight, gain, anchors, rho_hat, query, logits, given.routes)
    return Tensors(*inputs, rstd, weights, indices, lse)


def empty_grads(tensors: Tensors, options: Options) -> Tensors:
    """Allocate the gradients of the inputs."""

    def room(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
        return None if tensor is None else empty(*tensor.shape, like=tensor, dtype=dtype)

    t = tensors
    return Tensors(
        x=room(t.x) if options.need_x else None,
        weight=room(t.weight),
        gain=room(t.gain),
        anchors=room(t.anchors),
        rho_hat=room(t.rho_hat),
        query=room(t.query) if t.x is None and t.anchors is not None else None,
        logits=room(t.logits, torch.float32) if t.x is None and t.anchors is None else None,
    )
