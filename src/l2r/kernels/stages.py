"""Call a backend's functions for one stage after another."""

from collections.abc import Callable

from l2r.kernels.contract import Options, Tensors


def in_one_stage(tensors: Tensors, options: Options) -> bool:
    """Return whether a call has one stage only."""
    return (tensors.x is not None) + (tensors.anchors is not None) + (options.top_k > 0) == 1


def forward_in_stages(
    forward: Callable[[Tensors, Options], Tensors], given: Tensors, options: Options
) -> Tensors:
    """Call ``forward`` for one stage after another."""
    done, early = given, options._replace(top_k=0)
    if given.x is not None:
        projected = forward(Tensors(x=given.x, weight=given.weight, gain=given.gain), early)
        done = done._replace(query=projected.query, rstd=projected.rstd)
    if given.anchors is not None:
        stage = Tensors(anchors=given.anchors, query=done.query, rho_hat=given.rho_hat)
        done = done._replace(logits=forward(stage, early).logits)
    if options.top_k:
        chosen = forward(Tensors(logits=done.logits, routes=given.routes), options)
        done = done._replace(weights=chosen.weights, indices=chosen.indices, lse=chosen.lse)
    return done


def backward_in_stages(
    backward: Callable[[Tensors, Tensors, Options], Tensors],
    tensors: Tensors,
    up: Tensors,
    options: Options,
) -> Tensors:
    """Call ``backward`` for one stage after another, the last first."""
    t, early, grads = tensors, options._replace(top_k=0), up
    if options.top_k:
        stage = Tensors(logits=t.logits, weights=t.weights, indices=t.indices, lse=t.lse)
        grads = backward(stage, grads, options)
    if t.anchors is not None:
        stage = Tensors(anchors=t.anchors, query=t.query, logits=t.logits, rho_hat=t.rho_hat)
        grads = backward(stage, grads, early)
    if t.x is None:
        return grads
    stage = Tensors(x=t.x, weight=t.weight, gain=t.gain, query=t.query, rstd=t.rstd)
    projected = backward(stage, grads, early)
    return projected._replace(anchors=None if t.anchors is None else grads.anchors)
