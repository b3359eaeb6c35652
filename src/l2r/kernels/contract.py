"""What the forms of a router agree on: tensors and options of a call, two functions.

A backend is a module with two functions, see ``Backend``. Both take a call in stages, project
(x to query), score (query to logits) and select (logits to weights), of which any run of
neighbors may be given; the tensors of the others are None.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert, K chosen.
"""

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Scoring = Literal["dot", "cosine", "sips"]
SCORINGS: dict[str, int] = {"dot": 0, "cosine": 1, "sips": 2}  # as numbered in the kernels


class Score(NamedTuple):
    """Constants of a router's logits, in the order of the structure in ``native/router.h``.

    gamma, beta, p: of phi and psi. eps: smallest length divided by. scale: multiplies the pooled
    logits, one over the temperature. norm_eps: of the RMSNorm before the projection.
    """

    scoring: Scoring = "dot"
    gamma: float = 1.0
    beta: float = 1.0
    p: float = 4.0
    eps: float = 1e-6
    scale: float = 1.0
    norm_eps: float = 1e-5


DEFAULTS = Score()


class Options(NamedTuple):
    """What a call is told beside its tensors.

    top_k: experts to select; 0, no selection. normalize: the weights of a token sum to 1.
    save: a forward keeps what only a backward needs. need_x: a backward makes the gradient of x.
    """

    score: Score = DEFAULTS
    top_k: int = 0
    normalize: bool = False
    save: bool = False
    need_x: bool = False


class Tensors(NamedTuple):
    """Inputs and results of a call, or the gradients of some, in the order of the C structure.

    project: x [T, D], weight [R, D], maybe gain [D] to query [T, R] and, with a gain, one over
    the RMS of every token. score: query, anchors [N, H, R], maybe rho_hat [T] to logits [T, N].
    select: logits to weights and indices [T, K] and the log-sum-exp of the logits [T].

    The first ``GIVEN`` may be given, those from ``MADE`` on may be made: query and logits both.
    """

    x: Tensor | None = None
    weight: Tensor | None = None
    gain: Tensor | None = None
    anchors: Tensor | None = None
    rho_hat: Tensor | None = None
    query: Tensor | None = None
    logits: Tensor | None = None
    rstd: Tensor | None = None
    weights: Tensor | None = None
    indices: Tensor | None = None
    lse: Tensor | None = None


GIVEN: Final = 7
MADE: Final = 5


@runtime_checkable
class Backend(Protocol):
    """What the module of a backend has. Tensors are contiguous, on one device, T may be 0."""

    def forward(self, given: Tensors, options: Options) -> Tensors:
        """The given tensors and the results of their stages."""
        ...

    def backward(self, tensors: Tensors, up: Tensors, options: Options) -> Tensors:
        """Gradients of what ``forward`` was given, from its results and theirs; T is at least 1.

        ``up`` has those of the logits and weights, or of a query that is the last result. The
        gradient of given logits is fp32 whatever their dtype.
        """
        ...


def first_input(tensors: Tensors) -> Tensor:
    """What the first stage reads; its rows are the tokens."""
    if tensors.x is not None:
        return tensors.x
    tensor = tensors.query if tensors.anchors is not None else tensors.logits
    assert tensor is not None
    return tensor


def sizes_of(tensors: Tensors) -> tuple[Any, ...]:
    """T, D, R, N and H, 0 where a stage is absent; under a compiler they may be symbols."""
    x, weight, _, anchors, _, _, logits, *_ = tensors
    hidden = rank = experts = heads = 0
    if x is not None:
        hidden = x.shape[1]
    if anchors is not None:
        experts, heads, rank = anchors.shape
    elif weight is not None:
        rank = weight.shape[0]
    elif logits is not None:
        experts = logits.shape[1]
    return first_input(tensors).shape[0], hidden, rank, experts, heads


def in_one_stage(tensors: Tensors, options: Options) -> bool:
    """Whether a call is one stage alone."""
    return (tensors.x is not None) + (tensors.anchors is not None) + (options.top_k > 0) == 1


def forward_in_stages(
    forward: Callable[[Tensors, Options], Tensors], given: Tensors, options: Options
) -> Tensors:
    """``forward`` called for one stage after another."""
    done, early = given, options._replace(top_k=0)
    if given.x is not None:
        projected = forward(Tensors(given.x, given.weight, given.gain), early)
        done = done._replace(query=projected.query, rstd=projected.rstd)
    if given.anchors is not None:
        stage = Tensors(anchors=given.anchors, query=done.query, rho_hat=given.rho_hat)
        done = done._replace(logits=forward(stage, early).logits)
    if options.top_k:
        chosen = forward(Tensors(logits=done.logits), options)
        done = done._replace(weights=chosen.weights, indices=chosen.indices, lse=chosen.lse)
    return done


def backward_in_stages(
    backward: Callable[[Tensors, Tensors, Options], Tensors],
    tensors: Tensors,
    up: Tensors,
    options: Options,
) -> Tensors:
    """``backward`` called for one stage after another, the last first."""
    x, weight, gain, anchors, rho_hat, query, logits, rstd, weights, indices, lse = tensors
    early, grads = options._replace(top_k=0), up
    if options.top_k:
        stage = Tensors(logits=logits, weights=weights, indices=indices, lse=lse)
        grads = backward(stage, grads, options)
    if anchors is not None:
        stage = Tensors(anchors=anchors, query=query, logits=logits, rho_hat=rho_hat)
        grads = backward(stage, grads, early)
    if x is None:
        return grads
    projected = backward(Tensors(x, weight, gain, query=query, rstd=rstd), grads, early)
    return projected._replace(anchors=None if anchors is None else grads.anchors)


def empty(*shape: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialized memory for a result (sizes may be symbols); the tests fill it with NaN."""
    if dtype is None or dtype is like.dtype:
        return like.new_empty(*shape)  # half a microsecond less
    return like.new_empty(shape, dtype=dtype)


def empty_results(given: Tensors, options: Options) -> Tensors:
    """The tensors of a call with room for the results of its stages."""
    x, weight, gain, anchors, rho_hat, query, logits, rstd, weights, indices, lse = given
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
    return Tensors(x, weight, gain, anchors, rho_hat, query, logits, rstd, weights, indices, lse)


def empty_grads(tensors: Tensors, options: Options) -> Tensors:
    """Room for the gradients of what was given."""

    def room(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
        return None if tensor is None else empty(*tensor.shape, like=tensor, dtype=dtype)

    x, weight, gain, anchors, rho_hat, query, logits, *_ = tensors
    return Tensors(
        room(x) if options.need_x else None,
        room(weight),
        room(gain),
        room(anchors),
        room(rho_hat),
        room(query) if x is None and anchors is not None else None,
        room(logits, torch.float32) if x is None and anchors is None else None,
    )
