"""Record and replay in OLMo-core.

with record(model) as recorder:
    model(ids)
routes = recorder.routes()
with replay(model, routes):   # inside it, forward and backward
    ...
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from l2r.engines.engine import require
from l2r.engines.routes import (
    WHOLE_ROWS,
    Choose,
    EngineRecorder,
    EngineReplay,
    RankSlice,
    RouterHook,
    recording,
    replaying,
    routers_by_layer,
)
from l2r.errors import InputError
from l2r.hf.routes import Fingerprint, Routes, Side

require("ai2-olmo-core")

from olmo_core.nn.moe.router import MoERouter  # noqa: E402


def record(model: nn.Module) -> AbstractContextManager[EngineRecorder]:
    """Record the experts that ``model`` takes inside the block; ``recorder.routes()``.

    Every call is a batch of token ids [rows, columns]. Works with OLMo-core's routers and ours,
    and under tensor parallel, where all ranks must ask for the routes. Raises ValueError for a
    model without routers and under context parallel.
    """
    return recording(model, *_router_hooks(model))


def replay(
    model: nn.Module, routes: Routes, *, side: Side = "right"
) -> AbstractContextManager[EngineReplay]:
    """Let ``model`` take the experts of ``routes`` inside the block, its backward pass included.

    Calls read the sequences in their order, one a row, padded on ``side``. Weights come from the
    live scores, normalized where OLMo-core normalizes; tokens without a route choose for
    themselves. Raises ValueError as ``record``, and before the forward for routes that do not fit
    the model or a call.
    """
    return replaying(model, *_router_hooks(model), routes, side)


def _router_hooks(model: nn.Module) -> tuple[dict[int, RouterHook], Fingerprint]:
    routers = routers_by_layer(model, MoERouter, "OLMo-core")
    first = next(iter(routers.values()))
    if first.cp_mesh is not None:
        raise InputError("context parallel must be off to record or replay")
    router_hooks = {
        n: RouterHook(router, "get_top_k", _maker(router)) for n, router in routers.items()
    }
    sizes = Fingerprint(
        num_experts=first.num_experts,
        top_k=first.top_k,
        layers=tuple(sorted(routers)),
        hidden_layers=getattr(model, "n_layers", None),
    )
    return router_hooks, sizes


def _maker(router: Any) -> Callable[[Choose], Callable[..., tuple[Tensor, Tensor]]]:
    plain = router.get_top_k

    def make(choose: Choose) -> Callable[..., tuple[Tensor, Tensor]]:
        def get_top_k(scores: Tensor) -> tuple[Tensor, Tensor]:
            _, own = plain(scores)
            taken = choose(own, _part(router))
            return scores.gather(-1, taken), taken

        return get_top_k

    return make


def _part(router: Any) -> RankSlice:
    """Piece of the sequence that this rank's router gets."""
    mesh = router.tp_mesh
    return (
        WHOLE_ROWS
        if mesh is None
        else RankSlice(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    )
