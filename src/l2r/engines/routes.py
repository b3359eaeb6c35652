"""Record and replay in engines: what OLMo-core, Megatron-core and torchtitan share.

Each engine's folder has a ``routes`` with ``record`` and ``replay``. Nothing is kept but in the
modules of the model that was given, and that only inside the block.

Shape letters: S sequences, B rows of a call, W its columns, w columns on this rank, K experts
chosen per token, L layers with a router.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from torch import Tensor, nn

from l2r.engines.route_calls import Call, Calls, Choose, Part, Seat
from l2r.errors import InputError
from l2r.hf.routes import (
    NO_ROUTE,
    Fingerprint,
    Routes,
    Side,
    in_backward,
    outside_of_graphs,
)
from l2r.hf.swap import layer_index
from l2r.routers.temporary import removing, replaced


class Recorder(Calls):
    """Experts that the routers of an engine's model used; see the engine's ``record``."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        super().__init__()
        self.fingerprint = fingerprint
        self._taken: dict[Call, dict[int, tuple[Tensor, Part]]] = {}
        self._open: dict[int, tuple[Tensor, Part]] = {}  # by layer, of the call that runs

    @outside_of_graphs
    def keep(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep what the routers took in a call, which has succeeded."""
        if self._now is not None and self._open:
            self._taken[self._now] = self._open
        super().keep(model, args, output)

    def _check(self, call: Call) -> None:
        del call
        self._open = {}

    def _choose(self, call: Call, layer: int, own: Tensor, part: Part) -> Tensor:
        if not in_backward():
            self._open[layer] = own.detach().clone(), part
        return own

    def routes(self, masks: Sequence[Bool[Tensor, "B W"]] | None = None) -> Routes:
        """Routes of all calls so far, of the whole rows; every rank of a group must ask.

        masks: where there are tokens, one for each call; None for everywhere. Raises ValueError
        before the first call and for masks of other shapes.
        """
        if not self._taken:
            raise InputError("nothing was recorded yet; call the model inside the block")
        if masks is None:
            masks = [torch.ones(call.rows, call.columns, dtype=torch.bool) for call in self._taken]
        if len(masks) != len(self._taken):
            raise InputError(f"masks must be {len(self._taken)}, one a call; got {len(masks)}")
        parts = []
        for mask, taken in zip(masks, self._taken.values(), strict=True):
            layers = [_gathered(*taken[layer]) for layer in self.fingerprint.layers]
            experts = torch.stack(layers, dim=2)
            experts = experts.masked_fill(~mask[..., None, None].bool().cpu(), NO_ROUTE)
            parts.append(Routes.from_padded(experts, mask.cpu(), self.fingerprint))
        return Routes.concatenate(parts)


class Replay(Calls):
    """Routes on their way into an engine's model; see the engine's ``replay``."""

    def __init__(self, routes: Routes, side: Side) -> None:
        super().__init__()
        self._routes, self._side = routes, side
        self._places = {layer: place for place, layer in enumerate(routes.layers)}
        self._grids: dict[int, Tensor] = {}

    def _choose(self, call: Call, layer: int, own: Tensor, part: Part) -> Tensor:
        width = own.shape[1]
        if own.shape[0] != call.rows or width * part.ranks != call.columns:
            raise InputError(
                f"the router of layer {layer} must see {call.rows} rows of "
                f"{call.columns} / {part.ranks} tokens; it saw {list(own.shape[:2])}"
            )
        rows = self._grids[call.columns][call.first : call.first + call.rows]
        columns = slice(part.rank * width, (part.rank + 1) * width)
        recorded = rows[:, columns, self._places[layer]].to(own.device, own.dtype)
        return torch.where(recorded[..., :1] == NO_ROUTE, own, recorded)

    def _check(self, call: Call) -> None:
        left = len(self._routes) - call.first
        if left < call.rows:
            raise InputError(
                f"a call reads {call.rows} sequences; {left} of the routes' "
                f"{len(self._routes)} are left"
            )
        if call.columns not in self._grids:
            self._grids[call.columns] = self._routes.padded(self._side, call.columns)[0]


@contextmanager
def recording(
    model: nn.Module, seats: Mapping[int, Seat], sizes: Fingerprint
) -> Iterator[Recorder]:
    """Record the experts that the routers of ``seats``, by layer, take in calls of ``model``."""
    recorder = Recorder(sizes)
    with _watched(model, seats, recorder):
        yield recorder


@contextmanager
def replaying(
    model: nn.Module, seats: Mapping[int, Seat], sizes: Fingerprint, routes: Routes, side: Side
) -> Iterator[Replay]:
    """Let the routers of ``seats``, by layer, take the experts of ``routes``.

    Raises ValueError for routes of other sizes, or without one of the layers.
    """
    missing = sorted(set(seats) - set(routes.layers))
    if missing:
        raise InputError(
            f"routes must have the layers of the model; {missing} are not in {routes.layers}"
        )
    for name in ("num_experts", "top_k"):
        ours, theirs = getattr(routes.fingerprint, name), getattr(sizes, name)
        if ours != theirs:
            raise InputError(
                f"routes and model must have the same {name}; got {ours} in the routes and "
                f"{theirs} in the model"
            )
    routes.padded(side, int(routes.lengths.max(initial=0)))  # raises for another side
    session = Replay(routes, side)
    with _watched(model, seats, session):
        yield session
    if len(routes) and not session.sequences:
        raise InputError(
            "replay must see a call of the model that it got; it saw none that succeeded"
        )


@contextmanager
def _watched(
    model: nn.Module, seats: Mapping[int, Seat], session: Recorder | Replay
) -> Iterator[None]:
    def asking(layer: int) -> Choose:
        return lambda own, part: session.ask(layer, own, part)

    layers = {(s.owner, s.name): s.make(asking(layer)) for layer, s in seats.items()}
    hooks = (
        model.register_forward_pre_hook(session.begin, with_kwargs=True),
        model.register_forward_hook(session.keep),  # before the one that ends the call
        model.register_forward_hook(session.end, always_call=True),
    )
    with removing(dict.fromkeys(hooks, model)), replaced(layers):
        yield


def routers_by_layer(model: nn.Module, kind: type, engine: str) -> dict[int, Any]:
    """Routers of a class by the number of their layer. Raises ValueError where there is none."""
    routers = {layer_index(n): m for n, m in model.named_modules() if isinstance(m, kind)}
    if not routers:
        raise InputError(f"the model has no router of {engine}'s")
    return routers


def _gathered(own: Int[Tensor, "B w K"], part: Part) -> Int[Tensor, "B W K"]:
    own = own.long().contiguous()
    if part.ranks == 1:
        return own.cpu()
    pieces = [torch.empty_like(own) for _ in range(part.ranks)]
    dist.all_gather(pieces, own, group=part.group)
    return torch.cat(pieces, dim=1).cpu()
