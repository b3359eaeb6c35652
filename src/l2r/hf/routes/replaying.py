"""Let a model take recorded experts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from l2r.errors import InputError
from l2r.hf.models.layouts import unpack_before_calls
from l2r.hf.routes.backward_pass import next_number, outside_of_graphs, running_number
from l2r.hf.routes.calls import (
    RouteReader,
    RouteRows,
    gathering,
    gathers,
    read_inputs,
    taking,
    with_no_route_row,
)
from l2r.hf.routes.layers import (
    RoutedLayer,
    fingerprint_of,
    routed_layers,
)
from l2r.hf.routes.routes import Routes
from l2r.hf.swap.sites import Site, modules_by_path
from l2r.kernels.tracing import in_backward
from l2r.routers.offload import device_of
from l2r.routers.temporary import removing, replaced

Weights = Literal["live", "recorded"]
# What a module calls to run a part of itself again in the backward pass.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


class Replay:
    """Routes on their way through the calls of a model; see ``replay``."""

    def __init__(
        self, model: nn.Module, routes: Routes, *, weights: Weights, tokenizer: Any
    ) -> None:
        if weights not in ("live", "recorded"):
            raise InputError(f"weights must be live or recorded; got weights={weights!r}")
        if weights == "recorded" and routes.weights is None:
            raise InputError("weights='recorded' needs routes of record(model, weights=True)")
        unpack_before_calls(model)
        layers = routed_layers(model)
        routes.fingerprint.check(fingerprint_of(model, tokenizer, layers=layers))
        self._routes = routes
        self._reading = RouteReader(routes)
        self._rows: RouteRows | None = None  # of the call that runs
        self._caller = 0  # thread of the running call
        self._first_node = 0
        self._spans: list[tuple[range, RouteRows]] = []  # nodes of the graph of a call, its rows
        self._running = threading.RLock()
        self._device = device_of(layers[0].sites[0].router)
        self._forwards = {
            (site.router, "forward"): self._replaying(place, layer, site, weights)
            for place, layer in enumerate(layers)
            for site in layer.sites
            if not site.by_token  # the same tokens have the same experts
        }
        self._checkpoints = {
            (module, name): self._carrying(vars(module)[name])
            for _, module in modules_by_path(model)
            for name in _CHECKPOINTS
            if callable(vars(module).get(name))
        }
        self._active = False

    @property
    def remaining(self) -> int:
        """Sequences that no call which succeeded has read yet."""
        return self._reading.remaining

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Routers replay inside the block."""
        self._active = True
        try:
            with replaced({**self._forwards, **self._checkpoints}):
                yield
        finally:
            self._active = False

    @outside_of_graphs
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the rows of the routes that a call reads."""
        if self._rows is not None and self._caller != threading.get_ident():
            raise InputError(
                "a replayed model is called by one thread at a time; another thread's call runs"
            )
        self._caller = threading.get_ident()
        rows = self._reading.rows(read_inputs(model, args, kwargs))
        complete = bool((rows < len(self._routes.experts)).all())
        self._rows = RouteRows(torch.from_numpy(rows).to(self._device), complete)
        self._first_node = next_number()

    @outside_of_graphs
    def keep(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Go on in the routes: the call has succeeded."""
        self._reading.keep()

    @outside_of_graphs
    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forget the rows when the call is over, but for its backward pass."""
        if self._caller != threading.get_ident():
            return
        if self._rows is not None and next_number() > self._first_node:
            self._spans.append((range(self._first_node, next_number()), self._rows))
        self._rows = None

    @contextmanager
    def during(self, rows: RouteRows) -> Iterator[None]:
        """Run a part of a call again, in the backward pass, inside the ``replay`` block or after.

        One at a time: the backward pass has a thread for each device.
        """
        with self._running:
            before, self._rows = self._rows, rows
            try:
                if self._active:
                    yield
                else:
                    with replaced(self._forwards):
                        yield
            finally:
                self._rows = before

    def _replaying(
        self, place: int, layer: RoutedLayer, site: Site, weights: Weights
    ) -> Callable[..., Any]:
        small = np.int16 if self._routes.fingerprint.num_experts <= 1 << 15 else np.int32
        experts = with_no_route_row(self._routes.experts[:, place].astype(small)).to(self._device)
        if weights == "recorded" and self._routes.weights is not None:
            recorded = with_no_route_row(self._routes.weights[:, place]).to(self._device)
            return taking(site, experts, recorded, partial(self._rows_of, layer.layer))
        take = gathering if gathers(site) else taking
        return take(site, experts, None, partial(self._rows_of, layer.layer))

    def _rows_of(self, layer: int, tokens: int) -> RouteRows | None:
        """Rows of the routes of a router's call with so many inputs; None where it is its own."""
        rows = self._rows
        if rows is None:
            rows = self._recomputed_rows(layer)
        if rows is not None and rows.of.shape[0] != tokens:
            raise InputError(
                f"the router of layer {layer} must see the {rows.of.shape[0]} inputs of "
                f"the model; it saw {tokens}"
            )
        return rows

    def _carrying(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return a checkpointing function whose recomputation has the rows of its forward."""

        @wraps(checkpoint)  # those who ask whether it is reentrant find it
        def carrying(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            rows = self._rows
            if rows is None or torch.compiler.is_compiling():  # its graph has the rows
                return checkpoint(function, *args, **kwargs)

            def again(*inputs: Any, **options: Any) -> Any:
                with self.during(rows):
                    return function(*inputs, **options)

            return checkpoint(again, *args, **kwargs)

        return carrying

    @outside_of_graphs
    def _recomputed_rows(self, layer: int) -> RouteRows | None:
        """Rows of the call whose backward pass runs; None for one from before the block."""
        if in_backward():
            number = running_number()
            for nodes, rows in self._spans:
                if number in nodes:
                    return rows
            if not self._spans or number < self._spans[0][0].start:
                return None
        if not self._active:  # a later block keeps this one's function alive
            return None
        raise InputError(
            f"the router of layer {layer} ran outside of a call of the model that is replayed; "
            "pass the model that is called to replay, compiled where it is"
        )


@contextmanager
def replay(
    model: nn.Module, routes: Routes, *, weights: Weights = "live", tokenizer: Any = None
) -> Iterator[Replay]:
    """Let ``model`` take the experts of ``routes`` inside the block.

    Which experts are taken is fixed. Their weights come from the live logits by the model's own
    rule, so that gradients reach the router; ``weights="recorded"`` fixes them too. Tokens
    without a route choose for themselves.

    Calls read the sequences in their order: a padded batch one a row, by its 2-D
    ``attention_mask``; without a mask, whole sequences one after another, row by row; a call with
    a cache goes on with those of the call before. In any other call each sequence must have as
    many tokens as in the routes. Activation checkpointing of transformers and of
    ``checkpoint_wrapper`` may recompute inside the block or after it; where
    ``torch.utils.checkpoint`` is called directly, backward must run inside. A compiled model is
    passed compiled.

    A call that fails leaves its sequences to the next; of a generation that fails, the calls
    before have read them. Of two blocks on one model the one that was opened last decides, where
    it has a route; they may end in any order.

    Raises ValueError before the forward for routes that do not fit the model, the tokenizer or
    the tokens of a call, and at the end of a block in which no call of the model succeeded.
    """
    session = Replay(model, routes, weights=weights, tokenizer=tokenizer)
    hooks = (
        model.register_forward_pre_hook(session.begin, with_kwargs=True),
        model.register_forward_hook(session.keep),
        model.register_forward_hook(session.end, always_call=True),
    )
    with removing(dict.fromkeys(hooks, model)), session.installed():
        yield session
    if len(routes) and session.remaining == len(routes):
        raise InputError(
            "replay must see a call of the model that it got; it saw none that succeeded"
        )
