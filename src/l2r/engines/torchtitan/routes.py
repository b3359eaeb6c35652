"""Record and replay in torchtitan.

    with record(model) as recorder:
        model(ids, places, masks)
    routes = recorder.routes()
    with replay(model, routes):   # inside it, forward and backward
        ...

Models must not be compiled: torchtitan compiles whole blocks, with the choice inside.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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

require("torchtitan")

from torchtitan.models.common.moe import TokenChoiceTopKRouter  # noqa: E402


def record(model: nn.Module) -> AbstractContextManager[EngineRecorder]:
    """Record the experts that ``model`` takes inside the block; ``recorder.routes()``.

    Every call is a batch of token ids [rows, columns], or hidden states where ``model`` is a layer.
    Works with torchtitan's gates and ours, and where the sequence is cut over ranks, which must all
    ask for the routes. Raises ValueError for a model without routers.
    """
    return recording(model, *_router_hooks(model))


def replay(
    model: nn.Module, routes: Routes, *, side: Side = "right"
) -> AbstractContextManager[EngineReplay]:
    """Let ``model`` take the experts of ``routes`` inside the block, its backward pass included.

    Calls read the sequences in their order, one a row, padded on ``side``. Weights come from the
    live scores by torchtitan's rule; tokens without a route choose for themselves. Raises
    ValueError as ``record``, and before the forward for routes that do not fit the model or a call.
    """
    return replaying(model, *_router_hooks(model), routes, side)


def _router_hooks(model: nn.Module) -> tuple[dict[int, RouterHook], Fingerprint]:
    routers = routers_by_layer(model, TokenChoiceTopKRouter, "torchtitan")
    first = next(iter(routers.values()))
    # A stage of a pipeline has some of the layers that its configuration has.
    layers = getattr(getattr(model, "config", None), "layers", getattr(model, "layers", routers))
    sizes = Fingerprint(
        num_experts=first.num_experts,
        top_k=first.top_k,
        layers=tuple(sorted(routers)),
        hidden_layers=len(layers),
    )
    return {
        n: RouterHook(router, "forward", _maker(router)) for n, router in routers.items()
    }, sizes


def _maker(router: Any) -> Callable[[Choose], Callable[..., tuple[Tensor, Tensor, Tensor]]]:
    """Return the forward of a router: weights of the experts that are taken, by its own rule."""
    plain = router.forward

    def make(choose: Choose) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        def forward(
            x_BLD: Tensor, expert_bias_E: Tensor | None = None
        ) -> tuple[Tensor, Tensor, Tensor]:
            _, own, scores = plain(x_BLD, expert_bias_E)
            if isinstance(own, DTensor):
                local = choose(own.to_local(), _part(own))
                taken: Tensor = DTensor.from_local(
                    local, own.device_mesh, own.placements, run_check=False
                )
            else:
                taken = choose(own, WHOLE_ROWS)
            weights = scores.gather(dim=-1, index=taken)
            if router.route_norm:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
            return weights * router.route_scale, taken, scores

        return forward

    return make


def _part(tokens: DTensor) -> RankSlice:
    """Return the piece of the sequence that this rank has. Rows are never cut inside a call."""
    cut = [n for n, place in enumerate(tokens.placements) if place.is_shard(1)]
    others = [p for p in tokens.placements if not p.is_replicate() and not p.is_shard(1)]
    if len(cut) > 1 or others:
        raise InputError(
            f"tokens must be cut once, over the sequence, to record or replay; "
            f"got {tokens.placements}"
        )
    if not cut:
        return WHOLE_ROWS
    mesh, dim = tokens.device_mesh, cut[0]
    return RankSlice(mesh.get_local_rank(dim), mesh.size(dim), mesh.get_group(dim))
