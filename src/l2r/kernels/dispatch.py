"""The one place that chooses an implementation; every router calls these names.

All implementations have the signatures and results of ``l2r.kernels.plain``: Triton kernels on a
GPU, blocked code on a CPU, and plain code where neither applies (float64, functorch transforms,
forward-mode derivatives, export, other devices, sizes beyond the kernels).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from l2r.kernels import plain
from l2r.kernels.backend import FUSED, Choice, Score, module, name_for
from l2r.kernels.op_common import traced
from l2r.kernels.plain import Routed, Scoring

__all__ = [
    "Routed",
    "anchor_logits",
    "implementation",
    "linear_logits",
    "route",
    "routing_query",
    "softmax_top_k",
]

_DTYPES = {torch.float32, torch.bfloat16, torch.float16}
WORTH_SELECTING = 2**14  # logits from which the CPU's own selection is faster than torch's calls
_LIMITS = {"experts": 1024, "heads": 64, "rank": 64}  # of the Triton kernels

linear_logits = plain.linear_logits  # one matrix product: the libraries' own is the fused form


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Use ``plain``, ``cpu`` or ``triton`` code inside the block, whatever the device.

    Raises ValueError for another name.
    """
    if name not in ("plain", *FUSED):
        raise ValueError(f"implementation must be plain, {' or '.join(FUSED)}; got {name!r}")
    previous, Choice.forced = Choice.forced, name
    try:
        yield
    finally:
        Choice.forced = previous


def routing_query(
    x: Float[Tensor, "T D"],
    projection: Float[Tensor, "R D"],
    gain: Float[Tensor, " D"] | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Tensor, "T R"]:
    """Query of the router input; see ``plain.routing_query``."""
    fused = _fused(traced(x, projection, gain), x, projection, rank=projection.shape[0])
    if fused is None:
        return plain.routing_query(x, projection, gain, eps=eps)
    _check_query(x, projection, gain)
    from l2r.kernels import ops

    return ops.routing_query(x, projection, gain, eps, fused)[0]


def anchor_logits(
    query: Float[Tensor, "T R"],
    anchors: Float[Tensor, "N H R"],
    *,
    scoring: Scoring,
    gamma: float = 1.0,
    beta: float = 1.0,
    p: float = 4.0,
    rho_hat: Float[Tensor, " T"] | None = None,
    eps: float = 1e-6,
) -> Float[Tensor, "T N"]:
    """Score every anchor and pool; see ``plain.anchor_logits``."""
    experts, heads, rank = anchors.shape
    fused = _fused(
        traced(query, anchors, rho_hat), query, anchors, experts=experts, heads=heads, rank=rank
    )
    if fused is None:
        return plain.anchor_logits(
            query, anchors, scoring=scoring, gamma=gamma, beta=beta, p=p, rho_hat=rho_hat, eps=eps
        )
    _check_anchors(query.t(), anchors, 1)
    from l2r.kernels import ops

    return ops.anchor_logits(query, anchors, rho_hat, scoring, gamma, beta, p, eps, 1.0, fused)


def softmax_top_k(
    logits: Float[Tensor, "T N"], top_k: int, *, normalize: bool = False
) -> tuple[Float[Tensor, "T K"], Tensor]:
    """Softmax over experts and the k largest; see ``plain.softmax_top_k``."""
    watched = traced(logits)
    fused = _fused(watched, logits, experts=logits.shape[1])
    if fused is None or (fused == "cpu" and (watched or logits.numel() < WORTH_SELECTING)):
        return plain.softmax_top_k(logits, top_k, normalize=normalize)
    _check_top_k(top_k, logits.shape[1])
    if _direct(watched, logits):
        options = {"normalize": normalize, "sums": False, "save": False}
        return module(fused).select(logits.contiguous(), top_k, **options)[:2]
    from l2r.kernels import ops

    weights, indices, _, _ = ops.select(logits, top_k, normalize, False, fused)
    return weights, indices


def route(
    x: Float[Tensor, "T D"],
    projection: Float[Tensor, "R D"],
    gain: Float[Tensor, " D"] | None,
    anchors: Float[Tensor, "N H R"],
    *,
    scoring: Scoring,
    top_k: int,
    norm_eps: float = 1e-5,
    gamma: float = 1.0,
    beta: float = 1.0,
    p: float = 4.0,
    eps: float = 1e-6,
    temperature: float = 1.0,
    normalize: bool = False,
    sums: bool = False,
) -> Routed:
    """The whole router in one pass; see ``plain.route``."""
    experts, heads, rank = anchors.shape
    watched = traced(x, projection, gain, anchors)
    fused = _fused(watched, x, projection, anchors, experts=experts, heads=heads, rank=rank)
    if fused is None:
        return plain.route(
            x,
            projection,
            gain,
            anchors,
            scoring=scoring,
            top_k=top_k,
            norm_eps=norm_eps,
            gamma=gamma,
            beta=beta,
            p=p,
            eps=eps,
            temperature=temperature,
            normalize=normalize,
            sums=sums,
        )
    _check_query(x, projection, gain)
    _check_anchors(projection, anchors, top_k)
    if _direct(watched, x, projection, gain, anchors):
        score = Score(scoring, gamma, beta, p, eps, 1 / temperature)
        _, _, logits, selected = module(fused).route(
            x.contiguous(),
            projection.contiguous(),
            None if gain is None else gain.contiguous(),
            anchors.contiguous(),
            norm_eps=norm_eps,
            constants=score,
            top_k=top_k,
            normalize=normalize,
            sums=sums,
            save=sums,
        )
        return _routed(logits, *selected, by_products=sums)
    from l2r.kernels import op_route

    logits, weights, indices, lse, totals, _, _ = op_route.route(
        x,
        projection,
        gain,
        anchors,
        norm_eps,
        scoring,
        gamma,
        beta,
        p,
        eps,
        1 / temperature,
        top_k,
        normalize,
        sums,
        fused,
    )
    return _routed(logits, weights, indices, lse, totals, by_products=sums)


def _fused(watched: bool, *tensors: Tensor, **sizes: int) -> str | None:
    """Fused backend for these tensors, by the device of the first; None where plain code runs."""
    name = name_for(tensors[0])
    if name == "plain":
        return None
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            return None
    if torch.compiler.is_exporting() if watched else _transformed():
        return None
    fits = name == "cpu" or all(size <= _LIMITS[which] for which, size in sizes.items())
    return name if fits else None


def _check_query(x: Tensor, projection: Tensor, gain: Tensor | None) -> None:
    """Kernels read memory by these sizes: plain code finds a misfit itself."""
    hidden = x.shape[1]
    if projection.shape[1] != hidden:
        raise ValueError(
            f"projection must be [R, {hidden}] for x {list(x.shape)}; got {list(projection.shape)}"
        )
    if gain is not None and (gain.shape[0] != hidden or gain.dtype is not projection.dtype):
        raise ValueError(
            f"gain must be [{hidden}] of {projection.dtype}; got {list(gain.shape)} of {gain.dtype}"
        )


def _check_anchors(projection: Tensor, anchors: Tensor, top_k: int) -> None:
    if anchors.shape[2] != projection.shape[0]:
        raise ValueError(
            f"anchors must be [N, H, {projection.shape[0]}] for this query; "
            f"got {list(anchors.shape)}"
        )
    _check_top_k(top_k, anchors.shape[0])


def _check_top_k(top_k: int, experts: int) -> None:
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and {experts}; got top_k={top_k}")


def _routed(
    logits: Tensor,
    weights: Tensor,
    indices: Tensor,
    lse: Tensor,
    sums: Tensor,
    *,
    by_products: bool,
) -> Routed:
    if by_products:
        return Routed(logits, weights, indices, lse, sums)
    return Routed(logits, weights, indices, None, None)


def _direct(watched: bool, *tensors: Tensor | None) -> bool:
    """Without gradients, in plain eager mode, the backend is called past the operation.

    Decoding a token feels every microsecond of the call.
    """
    if watched:
        return False
    return not torch.is_grad_enabled() or not any(
        t is not None and t.requires_grad for t in tensors
    )


def _transformed() -> bool:
    """Inside vmap, grad, jvp or forward-mode differentiation, which need differentiable parts."""
    functorch = torch._C._functorch.peek_interpreter_stack()
    return functorch is not None or torch.autograd.forward_ad._current_level >= 0
