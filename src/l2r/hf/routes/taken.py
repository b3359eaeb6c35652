"""The forward of a router that takes the experts of routes.

Shape letters: T inputs of a router, N experts, K experts chosen per token, R rows of the routes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from l2r.hf.routes.array_checks import NO_ROUTE
from l2r.hf.routes.layers import check_weighable
from l2r.hf.swap.sites import Site
from l2r.routers import Router
from l2r.routers.observe import routed


class Rows(NamedTuple):
    """Row of the routes of each input of a call; complete: every input has a route."""

    of: Int[Tensor, " T"]
    complete: bool


ReadRows = Callable[[int], Rows | None]  # of a call with so many inputs; None: not replayed


def gathers(site: Site) -> bool:
    """Whether a router weighs given experts in the call that makes the logits."""
    router = site.router
    ours = isinstance(router, Router) and type(router).forward is Router.forward
    return ours and site.selection.fused


def gathering(site: Site, experts: Tensor, recorded: None, read_rows: ReadRows) -> Any:
    """A forward for which ``gathers`` holds: tokens without a route choose, in the same call."""
    del recorded
    forward = site.router.forward

    def gather(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["x"]
        rows = read_rows(x.shape[:-1].numel())
        if rows is None:
            return forward(*args, **kwargs)
        chosen = experts.to(x.device).index_select(0, rows.of.to(x.device)).to(torch.int64)
        given = kwargs.pop("routes", None)  # of a block that was opened later
        if given is not None:
            chosen = torch.where(given[:, :1] == NO_ROUTE, chosen, given)
        return forward(*args, **kwargs, routes=chosen)

    return gather


def taking(site: Site, experts: Tensor, recorded: Tensor | None, read_rows: ReadRows) -> Any:
    """The forward of any router, which chooses first; what it chose is replaced.

    ``recorded`` [R, K] are weights to take too.
    """
    router, forward, selection = site.router, site.router.forward, check_weighable(site)

    def take(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        logits, own_weights, own = routed(router, output)
        rows = read_rows(own.shape[0])
        if rows is None:
            return output
        at = rows.of.to(own.device)
        chosen = experts.to(own.device).index_select(0, at).to(own.dtype)
        unrouted = None if rows.complete else chosen[:, :1] == NO_ROUTE
        if unrouted is not None:
            chosen = torch.where(unrouted, own, chosen)
        if recorded is not None:
            weighed = recorded.to(own.device).index_select(0, at).to(own_weights.dtype)
            if unrouted is not None:
                weighed = torch.where(unrouted, own_weights, weighed)
        elif _known_equal(chosen, own):
            return output
        else:
            # Weights of the router itself where it chose the same: equal to the bit.
            same = (chosen == own).all(dim=1, keepdim=True)
            live = selection.weigh(router, logits, chosen).to(own_weights.dtype)
            weighed = torch.where(same, own_weights, live)
        values = (logits, weighed, chosen)
        return type(output)(*values) if hasattr(output, "_fields") else values

    return take


def _known_equal(chosen: Tensor, own: Tensor) -> bool:
    """Whether both are equal, where it costs little to know: no graph to break, no device to ask.

    Most steps of one token are; the rest of a replay takes longer than the comparison.
    """
    return not torch.compiler.is_compiling() and chosen.is_cpu and torch.equal(chosen, own)
