"""The backend interface: the tensors of a call, its options, two functions.

A backend is a module with the functions of ``Backend``. A call is a whole router (x, weight, maybe
gain, and anchors, to logits), a whole router with its selection, or a selection of given logits.
Tensors are used by name; those that a call does not have are None.

Shape letters: T tokens, D hidden size, R rank, N experts, H anchors per expert, K chosen.
"""

from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from l2r.functional.scoring import DEFAULTS, ScoreConstants

SCORINGS: dict[str, int] = {"dot": 0, "cosine": 1, "sips": 2}  # as numbered in the kernels


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
    """Tensors of a call, or gradients of some, in the order of the C structure.

    A router reads x [T, D], weight [R, D], maybe gain [D], and anchors [N, H, R], and computes
    logits [T, N]; for a backward it keeps query [T, R] and, with a gain, rstd [T], one over the RMS
    of every token. A selection reads logits, its own or given ones, and computes weights and
    indices [T, K] and, for a backward, lse [T], the log-sum-exp of the logits. With routes [T, K],
    int64, these are the indices; only tokens whose first route is negative choose for themselves.

    The first ``INPUTS`` may be given. Those from the last of these on are results: logits are both.
    """

    x: Tensor | None = None
    weight: Tensor | None = None
    gain: Tensor | None = None
    anchors: Tensor | None = None
    routes: Tensor | None = None
    logits: Tensor | None = None
    query: Tensor | None = None
    rstd: Tensor | None = None
    weights: Tensor | None = None
    indices: Tensor | None = None
    lse: Tensor | None = None


INPUTS: Final = 6


class Sizes(NamedTuple):
    """Sizes of a call, symbols under a compiler; a selection has tokens and experts alone."""

    tokens: Any
    hidden: Any = 0
    rank: Any = 0
    experts: Any = 0
    heads: Any = 0


@runtime_checkable
class Backend(Protocol):
    """Functions of a backend's module. Tensors are contiguous, on one device; T may be 0."""

    def forward(self, given: Tensors, options: Options) -> Tensors:
        """Return the given tensors together with the results."""
        ...

    def backward(self, tensors: Tensors, up: Tensors, options: Options) -> Tensors:
        """Return the gradients of the inputs, from all tensors of the forward; T is at least 1.

        ``up``: gradients of the logits and weights. The gradient of given logits is fp32 whatever
        their dtype.
        """
        ...


def first_input(tensors: Tensors) -> Tensor:
    """Return x, or the logits of a selection; its rows are the tokens."""
    tensor = tensors.logits if tensors.x is None else tensors.x
    assert tensor is not None
    return tensor


def sizes_of(tensors: Tensors) -> Sizes:
    """Return the sizes of a call."""
    x, anchors, logits = tensors.x, tensors.anchors, tensors.logits
    if x is None or anchors is None:
        assert logits is not None
        return Sizes(logits.shape[0], experts=logits.shape[1])
    (tokens, hidden), (experts, heads, rank) = x.shape, anchors.shape
    return Sizes(tokens, hidden, rank, experts, heads)


def empty(*shape: Any, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate memory for a result (sizes may be symbols); tests fill it with NaN."""
    if dtype is None or dtype is like.dtype:
        return like.new_empty(*shape)  # half a microsecond less
    return like.new_empty(*shape, dtype=dtype)


def empty_results(given: Tensors, options: Options) -> Tensors:
    """Allocate the results of a call; returned together with what was given."""
    weight, anchors, logits = given.weight, given.anchors, given.logits
    query = rstd = weights = indices = lse = None
    tokens, save, top_k = first_input(given).shape[0], options.save, options.top_k
    if weight is not None and anchors is not None:
        logits = empty(tokens, anchors.shape[0], like=anchors)
        if save:
            query = empty(tokens, weight.shape[0], like=weight)
            if given.gain is not None:
                rstd = empty(tokens, like=weight, dtype=torch.float32)
    if top_k:
        assert logits is not None
        weights = empty(tokens, top_k, like=logits, dtype=torch.float32)
        indices = empty(tokens, top_k, like=logits, dtype=torch.int64)
        lse = empty(tokens, like=logits, dtype=torch.float32) if save else None
    return given._replace(
        logits=logits, query=query, rstd=rstd, weights=weights, indices=indices, lse=lse
    )


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
        logits=room(t.logits, torch.float32) if t.x is None else None,
    )
