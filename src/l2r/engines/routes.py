"""Record and replay in engines: code that OLMo-core, Megatron-core and torchtitan share.

Each engine's folder has a ``routes`` with ``record`` and ``replay``. Nothing is kept but in the
modules of the model that was given, and that only inside the block.

Shape letters: S sequences, B rows of a call, W its columns, w columns on this rank, K experts
chosen per token, L layers with a router.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from l2r.errors import InputError
from l2r.hf.routes import (
    NO_ROUTE,
    Fingerprint,
    Routes,
    Side,
    in_backward,
    next_number,
    outside_of_graphs,
    running_number,
)
from l2r.hf.swap import layer_index
from l2r.routers.temporary import removing, replaced


class RankSlice(NamedTuple):
    """Index of this rank's piece among ``ranks`` equal pieces of every row, and their group."""

    rank: int = 0
    ranks: int = 1
    group: Any = None


WHOLE_ROWS = RankSlice()
# Arguments of the engines' models that tell the documents of a row apart.
_LENGTHS = ("doc_lens", "cu_doc_lens", "packed_seq_params")
_POSITIONS = ("positions", "position_ids")
_INTEGERS = (torch.int64, torch.int32)
# A router's own choice to what it must take: [B, w, K], or [w * B, K] with the rows innermost.
Choose = Callable[[Tensor, RankSlice], Tensor]


@dataclass(frozen=True)
class RouterHook:
    """An attribute of ``owner``, and what to put there so that a router asks which experts to take.

    ``make`` gets the question, and gives what answers as the one that stood there.
    """

    owner: Any
    name: str
    make: Callable[[Choose], Any]


class EngineCall(NamedTuple):
    """Rows and columns of a call of the model, and the number of its first sequence."""

    rows: int
    columns: int
    first: int


class EngineCalls(ABC):
    """Calls of a model one after another; a layer that is computed again belongs to its own.

    A call that fails leaves its sequences to the next.
    """

    def __init__(self) -> None:
        self.sequences = 0
        self._now: EngineCall | None = None
        self._first_node = 0
        self._spans: list[tuple[range, EngineCall]] = []  # nodes of the graph of a call

    @outside_of_graphs
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of the model."""
        rows, columns = _shape([*args, *kwargs.values()])
        _refuse_packed(args, kwargs)
        self._check(EngineCall(rows, columns, self.sequences))
        self._now, self._first_node = EngineCall(rows, columns, self.sequences), next_number()

    @outside_of_graphs
    def keep(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Count the rows of a call that succeeded."""
        if self._now is not None:
            self.sequences += self._now.rows

    @outside_of_graphs
    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End a call; its backward pass may follow."""
        if self._now is not None and next_number() > self._first_node:
            self._spans.append((range(self._first_node, next_number()), self._now))
        self._now = None

    def ask(self, layer: int, own: Tensor, rank_slice: RankSlice) -> Tensor:
        """Experts that a router uses in place of its choice ``own``; see ``Choose``."""
        call = self._running()
        if call is None:
            return own
        if own.ndim == 3:
            return self._choose(call, layer, own, rank_slice)
        grid = own.view(-1, call.rows, own.shape[-1]).transpose(0, 1)
        return self._choose(call, layer, grid, rank_slice).transpose(0, 1).reshape(own.shape)

    @outside_of_graphs
    def _running(self) -> EngineCall | None:
        """Return the call that runs, or that a backward pass computes again; None for another's.

        Raises ValueError where a router runs outside of both.
        """
        if self._now is not None:
            return self._now
        if not in_backward():
            raise InputError(
                "a router ran outside of a call of the model; pass the model that is called"
            )
        number = running_number()
        return next((call for nodes, call in self._spans if number in nodes), None)

    @abstractmethod
    def _check(self, call: EngineCall) -> None:
        """Raise ValueError where a call cannot be served."""

    @abstractmethod
    def _choose(
        self, call: EngineCall, layer: int, own: Int[Tensor, "B w K"], rank_slice: RankSlice
    ) -> Int[Tensor, "B w K"]: ...


def _shape(values: Sequence[Any]) -> tuple[int, int]:
    """Rows and columns of a call: of token ids [B, W], or of hidden states [B, W, D]."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.ndim == 2 and not tensor.is_floating_point():
            return tensor.shape[0], tensor.shape[1]
    for tensor in tensors:
        if tensor.ndim == 3:
            return tensor.shape[0], tensor.shape[1]
    raise InputError("a call must have token ids [rows, columns] to find its routes")


def _refuse_packed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for rows with several documents, whose routes are sequences of their own."""
    packed = [name for name in _LENGTHS if kwargs.get(name) is not None]
    for given in (*args[1:2], *(kwargs.get(name) for name in _POSITIONS)):
        if not isinstance(given, Tensor) or isinstance(given, DTensor):
            continue
        are_numbers = given.ndim == 2 and given.dtype in _INTEGERS
        if are_numbers and bool(((given[:, :-1] > 0) & (given[:, 1:] == 0)).any()):
            packed.append("positions that start again")  # 0 behind 0 is padding
    if packed:
        raise InputError(
            f"each row of a call must be one sequence to record or replay; got {packed[0]}: put "
            "each document in a row of its own"
        )


class EngineRecorder(EngineCalls):
    """Experts that the routers of an engine's model used; see the engine's ``record``."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        super().__init__()
        self.fingerprint = fingerprint
        self._taken: dict[EngineCall, dict[int, tuple[Tensor, RankSlice]]] = {}
        self._open: dict[int, tuple[Tensor, RankSlice]] = {}  # by layer, of the call that runs

    @outside_of_graphs
    def keep(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep what the routers took in a call, which has succeeded."""
        if self._now is not None and self._open:
            self._taken[self._now] = self._open
        super().keep(model, args, output)

    def _check(self, call: EngineCall) -> None:
        del call
        self._open = {}

    def _choose(self, call: EngineCall, layer: int, own: Tensor, rank_slice: RankSlice) -> Tensor:
        if not in_backward():
            self._open[layer] = own.detach().clone(), rank_slice
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


class EngineReplay(EngineCalls):
    """Routes on their way into an engine's model; see the engine's ``replay``."""

    def __init__(self, routes: Routes, side: Side) -> None:
        super().__init__()
        self._routes, self._side = routes, side
        self._places = {layer: place for place, layer in enumerate(routes.layers)}
        self._grids: dict[int, Tensor] = {}

    def _choose(self, call: EngineCall, layer: int, own: Tensor, rank_slice: RankSlice) -> Tensor:
        width = own.shape[1]
        if own.shape[0] != call.rows or width * rank_slice.ranks != call.columns:
            raise InputError(
                f"the router of layer {layer} must see {call.rows} rows of "
                f"{call.columns} / {rank_slice.ranks} tokens; it saw {list(own.shape[:2])}"
            )
        rows = self._grids[call.columns][call.first : call.first + call.rows]
        columns = slice(rank_slice.rank * width, (rank_slice.rank + 1) * width)
        recorded = rows[:, columns, self._places[layer]].to(own.device, own.dtype)
        return torch.where(recorded[..., :1] == NO_ROUTE, own, recorded)

    def _check(self, call: EngineCall) -> None:
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
    model: nn.Module, router_hooks: Mapping[int, RouterHook], sizes: Fingerprint
) -> Iterator[EngineRecorder]:
    """Record the experts that routers, by layer, take in calls of ``model``."""
    recorder = EngineRecorder(sizes)
    with _watched(model, router_hooks, recorder):
        yield recorder


@contextmanager
def replaying(
    model: nn.Module,
    router_hooks: Mapping[int, RouterHook],
    sizes: Fingerprint,
    routes: Routes,
    side: Side,
) -> Iterator[EngineReplay]:
    """Let the routers of ``router_hooks``, by layer, take the experts of ``routes``.

    Raises ValueError for routes of other sizes, or without one of the layers.
    """
    missing = sorted(set(router_hooks) - set(routes.layers))
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
    session = EngineReplay(routes, side)
    with _watched(model, router_hooks, session):
        yield session
    if len(routes) and not session.sequences:
        raise InputError(
            "replay must see a call of the model that it got; it saw none that succeeded"
        )


@contextmanager
def _watched(
    model: nn.Module, router_hooks: Mapping[int, RouterHook], session: EngineRecorder | EngineReplay
) -> Iterator[None]:
    def asking(layer: int) -> Choose:
        return lambda own, rank_slice: session.ask(layer, own, rank_slice)

    layers = {(s.owner, s.name): s.make(asking(layer)) for layer, s in router_hooks.items()}
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


def _gathered(own: Int[Tensor, "B w K"], rank_slice: RankSlice) -> Int[Tensor, "B W K"]:
    own = own.long().contiguous()
    if rank_slice.ranks == 1:
        return own.cpu()
    pieces = [torch.empty_like(own) for _ in range(rank_slice.ranks)]
    dist.all_gather(pieces, own, group=rank_slice.group)
    return torch.cat(pieces, dim=1).cpu()
