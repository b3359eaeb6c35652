"""Record and replay in Megatron-core, by its own RouterReplay.

    with record(model) as recorder:
        model(ids, positions, mask)
    routes = recorder.routes()
    with replay(model, routes):              # moe_enable_routing_replay=True in its configuration
        ...                                  # inside it, forward and backward

RouterReplay has a list of all routers of a process, in the order in which they were made, and one
action for all. Here those of one model are used, by the number of their layer, so that others go on
as they are. Tokens without a route choose for themselves, and a layer that is computed again in
the backward pass has the routes of its own call, whatever calls came in between.
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
)
from l2r.errors import InputError
from l2r.hf.routes import Fingerprint, Routes, Side

require("megatron-core")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplayAction  # noqa: E402

_TopK = Callable[..., tuple[Tensor, Tensor]]


def record(model: nn.Module) -> AbstractContextManager[EngineRecorder]:
    """Record the experts that ``model`` takes inside the block; ``recorder.routes()``.

    Every call is a batch of token ids [rows, columns]. Works with Megatron's routers and ours, and
    with tensor and sequence parallel, where all ranks must ask for the routes; under pipeline
    parallel each rank records its layers, of calls that have token ids. Layers of multi-token
    prediction choose for themselves. Raises ValueError for a model without routers, for packed
    sequences, and with context parallel or fused routing.
    """
    return recording(model, *_router_hooks(model, _recording))


def replay(
    model: nn.Module, routes: Routes, *, side: Side = "right"
) -> AbstractContextManager[EngineReplay]:
    """Let ``model`` take the experts of ``routes`` inside the block, its backward pass included.

    Calls read the sequences in their order, one a row, padded on ``side``. Weights come from the
    live scores by Megatron's rule. Raises ValueError as ``record``, without
    ``moe_enable_routing_replay``, and before the forward for routes that do not fit the model or a
    call.
    """
    router_hooks = _router_hooks(model, _replaying, moe_enable_routing_replay=True)
    return replaying(model, *router_hooks, routes, side)


def _router_hooks(
    model: nn.Module, maker: Callable[[Any], RouterHook], **wanted: Any
) -> tuple[dict[int, RouterHook], Fingerprint]:
    # Megatron counts the layers of multi-token prediction from 1 again; they have no routes.
    routers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, TopKRouter) and "mtp" not in name.split(".")
    ]
    if not routers:
        raise InputError("the model has no router of Megatron-core's")
    config: Any = routers[0].config
    for name, value in {"moe_router_fusion": False, "context_parallel_size": 1, **wanted}.items():
        if getattr(config, name, value) != value:
            raise InputError(
                f"{name} must be {value} to record or replay; got {getattr(config, name)}"
            )
    # A hybrid model counts attention and experts as two layers; elsewhere they are one.
    patterns = (getattr(part, "hybrid_layer_pattern", None) for part in model.modules())
    hybrid = next(filter(None, patterns), None)  # of the model inside its wrappers
    numbers = {router: router.layer_number - 1 for router in routers}
    if hybrid is not None:
        hybrid = hybrid.partition("/")[0].replace("|", "")
        numbers = {router: hybrid[:number].count("E") for router, number in numbers.items()}
    router_hooks = {number: maker(router) for router, number in numbers.items()}
    sizes = Fingerprint(
        num_experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        layers=tuple(sorted(router_hooks)),
        hidden_layers=config.num_layers if hybrid is None else hybrid.count("E"),
    )
    return router_hooks, sizes


class _Listening:
    """Stand in for the RouterReplay of a router that has none: it takes its own experts."""

    def __init__(self, router: Any, choose: Choose) -> None:
        self.router, self.choose = router, choose

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, compute: Any
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of the k best, as Megatron computes them."""
        weights, own = compute(scores, topk, num_groups, group_topk)
        self.choose(own, _part(self.router.config))
        return weights, own


def _recording(router: Any) -> RouterHook:
    own_replay = router.router_replay
    if own_replay is None:
        return RouterHook(router, "router_replay", lambda choose: _Listening(router, choose))
    plain = own_replay.get_replay_topk

    def make(choose: Choose) -> _TopK:
        def get_replay_topk(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights, own = plain(*args, **kwargs)
            choose(own, _part(router.config))
            return weights, own

        return get_replay_topk

    return RouterHook(own_replay, "get_replay_topk", make)


def _replaying(router: Any) -> RouterHook:
    own_replay = router.router_replay
    plain = type(own_replay).get_replay_topk

    def make(choose: Choose) -> _TopK:
        def get_replay_topk(
            scores: Tensor,
            topk: int,
            num_groups: int | None = None,
            group_topk: int | None = None,
            default_compute_topk: Any = None,
        ) -> tuple[Tensor, Tensor]:
            rules = (scores, topk, num_groups, group_topk, default_compute_topk)
            _, own = default_compute_topk(scores, topk, num_groups, group_topk)
            before = own_replay.router_replay_action
            own_replay.target_topk_idx = choose(own, _part(router.config))
            own_replay.router_replay_action = RouterReplayAction.REPLAY_FORWARD
            try:
                result: tuple[Tensor, Tensor] = plain(own_replay, *rules)
            finally:
                own_replay.router_replay_action = before
                own_replay.target_topk_idx = None
            return result

        return get_replay_topk

    return RouterHook(own_replay, "get_replay_topk", make)


def _part(config: Any) -> RankSlice:
    """Piece of the sequence that this rank's routers get."""
    if not config.sequence_parallel:
        return WHOLE_ROWS
    group = parallel_state.get_tensor_model_parallel_group()
    return RankSlice(group.rank(), group.size(), group)
