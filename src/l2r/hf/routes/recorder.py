"""Record which experts a model chooses.

Shape letters: T inputs of a router, L layers with a router, K experts chosen per token.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.hf.models.layouts import unpack_before_calls
from l2r.hf.routes.backward_pass import outside_of_graphs
from l2r.hf.routes.calls import CallInputs, Calls, Places, read_inputs
from l2r.hf.routes.fingerprint import Fingerprint
from l2r.hf.routes.layers import RoutedLayer, fingerprint_of, routed_layers
from l2r.hf.routes.routes import Routes
from l2r.kernels.tracing import in_backward
from l2r.routers.observe import routed
from l2r.routers.temporary import removing, replaced

_FEW, _TOGETHER = 64, 32  # inputs of a call that waits for others, and how many calls do


class Recorder:
    """Routes of the calls of a model; see ``record``."""

    def __init__(self, model: nn.Module, *, weights: bool, tokenizer: Any) -> None:
        self._choices = RouterChoices(model, tokenizer, weights=weights)
        self._keeps_weights = weights
        self._inputs: CallInputs | None = None
        self._calls = Calls()
        self._places: list[Places] = []
        self._experts, self._weights = _Kept(self._choices.small), _Kept()

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the model."""
        return self._choices.fingerprint

    def routes(self) -> Routes:
        """All that was recorded so far; a token that was read twice has its last route.

        Raises ValueError before the first call.
        """
        if not self._places:
            raise InputError("nothing was recorded yet; call the model inside the block")
        sequence = np.concatenate([places.sequence for places in self._places])
        token = np.concatenate([places.token for places in self._places])
        experts = self._experts.array()
        # the last of equals: what a rejected draft read is read again
        order = np.lexsort((np.arange(len(token)), token, sequence))
        same = np.diff(sequence[order]) == 0
        last = np.append(~(same & (np.diff(token[order]) == 0)), True)
        rows = order[last & (sequence[order] >= 0)]
        counts = np.bincount(sequence[rows], minlength=self._calls.sequences)
        lengths = np.zeros_like(counts)
        np.maximum.at(lengths, sequence[rows], token[rows] + 1)
        weights = None
        if self._keeps_weights:
            weights = self._weights.array()[rows]
        return Routes(experts[rows], self.fingerprint, lengths, counts, token[rows], weights)

    @outside_of_graphs
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the shape of a call."""
        self._choices.begin()
        self._inputs = read_inputs(model, args, kwargs)

    @outside_of_graphs
    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep what the routers chose in a call."""
        inputs = self._inputs
        assert inputs is not None
        experts = self._choices.by_layer("indices")
        tokens = len(experts[0])
        if self._calls.continues(inputs):
            places = self._calls.go_on(inputs)
        elif inputs.packed is not None:
            places = self._calls.begin_packed(inputs.packed)
        else:
            columns = inputs.columns or tokens // max(1, inputs.rows)
            places = self._calls.begin(inputs, columns)
        if places.inputs != tokens:
            raise InputError(
                f"routers must see every input of the model; it got {places.inputs} and they "
                f"saw {tokens}"
            )
        self._places.append(places)
        self._experts.add(experts)
        if self._keeps_weights:
            self._weights.add(self._choices.by_layer("weights"))

    @outside_of_graphs
    def close(self, *call: Any) -> None:
        """Record nothing more, whether the call succeeded or not."""
        self._choices.close()

    def leave(self) -> None:
        """End the block."""
        self._choices.end()

    def forwards(self) -> dict[tuple[nn.Module, str], Callable[..., Any]]:
        """Return a forward that records for every router."""
        return self._choices.forwards()


@contextmanager
def record(model: nn.Module, *, weights: bool = False, tokenizer: Any = None) -> Iterator[Recorder]:
    """Record the experts that ``model`` chooses inside the block.

    ``with record(model) as recorder: model(...)``; then ``recorder.routes()``. Every call adds
    its sequences: the rows of a padded batch by their 2-D ``attention_mask``, packed sequences by
    ``position_ids``; a call with a cache continues those of the call before. Layers that a
    backward pass recomputes are not recorded again. A compiled model is passed compiled.
    Calls of every thread are recorded, one at a time; blocks may end in any order.

    weights: record the weights of the experts too. tokenizer: its digest goes into the
    fingerprint. Raises ValueError for a model without routers of ours or of a supported family.
    """
    recorder = Recorder(model, weights=weights, tokenizer=tokenizer)
    hooks = (
        model.register_forward_pre_hook(recorder.begin, with_kwargs=True),
        model.register_forward_hook(recorder.end),
        model.register_forward_hook(recorder.close, always_call=True),
    )
    try:
        with removing(dict.fromkeys(hooks, model)), replaced(recorder.forwards()):
            yield recorder
    finally:
        recorder.leave()


class _Kept:
    """Choices of all calls, [T, L, K] as one array.

    A generated token is a call of its own. To stack its layers takes as long as all else that is
    recorded of it, so on a CPU calls of few tokens wait and are stacked together. On a GPU a
    captured graph writes the choice of the next call into the same memory.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self._parts: list[Tensor] = []
        self._waiting: list[list[Tensor]] = []

    def add(self, layers: list[Tensor]) -> None:
        """Keep the choices [T, K] of each layer in one call."""
        self._waiting.append(layers)
        one = len(layers[0]) <= _FEW and layers[0].is_cpu
        if not one or len(self._waiting) >= _TOGETHER:
            self._stack()

    def array(self) -> np.ndarray:
        """All choices so far."""
        self._stack()
        return np.concatenate([part.cpu().numpy() for part in self._parts])

    def _stack(self) -> None:
        if self._waiting:
            device = self._waiting[0][0].device
            layers = [torch.cat(parts) for parts in self._moved(device)]
            self._parts.append(torch.stack(layers, dim=1).to(self._dtype))
            self._waiting = []

    def _moved(self, device: torch.device) -> Iterator[list[Tensor]]:
        """Return the waiting choices by layer, on one device."""
        for calls in zip(*self._waiting, strict=True):
            yield [part.to(device) for part in calls]


class _Chosen:
    """Choice of a layer's router in the running call."""

    indices: Tensor | None = None
    weights: Tensor | None = None


class RouterChoices:
    """Experts that each router of a model chooses in one call.

    ``forwards`` are put in the place of the routers' own, see ``replaced``. weights: note those of
    the experts too. Raises ValueError for a model without routers of ours or of a supported family.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, *, weights: bool = False) -> None:
        unpack_before_calls(model)
        self._layers = routed_layers(model)
        self.fingerprint = fingerprint_of(model, tokenizer, layers=self._layers)
        self._notes_weights = weights
        self._chosen = [_Chosen() for _ in self._layers]
        self._open = False
        self._caller = 0  # thread of the running call
        self._ended = False  # the block, whose functions later blocks may still call

    def forwards(self) -> dict[tuple[nn.Module, str], Callable[..., Any]]:
        """Return a forward that notes its choice for every router."""
        pairs = zip(self._layers, self._chosen, strict=True)
        return {
            (site.router, "forward"): self._noting(layer, site.router, chosen)
            for layer, chosen in pairs
            for site in layer.sites
        }

    def begin(self) -> None:
        """Begin a call of the model: forget what was chosen before.

        Raises ValueError while a call of another thread runs.
        """
        if self._open and self._caller != threading.get_ident():
            raise InputError(
                "a recorded model is called by one thread at a time; another thread's call runs"
            )
        self._caller = threading.get_ident()
        for chosen in self._chosen:
            chosen.indices = chosen.weights = None
        self._open = True

    def close(self) -> None:
        """End the call, whether it succeeded or not."""
        if self._caller == threading.get_ident():
            self._open = False

    def end(self) -> None:
        """End the block: functions that later blocks keep alive note nothing."""
        self._open, self._ended = False, True

    def experts(self) -> Int[Tensor, "T L K"]:
        """Experts of the whole call, uint8 up to 256 of them and int32 above.

        Raises ValueError where a layer's router was not called.
        """
        return torch.stack(self._on_one_device("indices"), dim=1).to(self.small)

    @property
    def small(self) -> torch.dtype:
        """Dtype that holds the number of an expert."""
        return torch.uint8 if self.fingerprint.num_experts <= 256 else torch.int32

    def by_layer(self, name: str) -> list[Tensor]:
        """Return ``indices`` or ``weights`` [T, K] of each layer; ValueError as ``experts``."""
        parts: list[Tensor] = []
        for layer, chosen in zip(self._layers, self._chosen, strict=True):
            part = getattr(chosen, name)
            if part is None:
                raise InputError(
                    f"the router of layer {layer.layer} ({layer.sites[0].path}) was not called"
                )
            parts.append(part)
        return parts

    def _on_one_device(self, name: str) -> list[Tensor]:
        first, *others = self.by_layer(name)
        return [first, *(part.to(first.device) for part in others)]

    def _noting(self, layer: RoutedLayer, router: nn.Module, chosen: _Chosen) -> Callable[..., Any]:
        forward = router.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self._open:
                _, weights, indices = routed(router, output)
                if chosen.indices is not None:
                    raise InputError(
                        f"the router of layer {layer.layer} was called twice in a call: its layers "
                        "run in a loop, and a token has no single route"
                    )
                chosen.indices = indices.detach()
                if self._notes_weights:
                    chosen.weights = weights.detach()
            elif not self._ended:
                _check_recomputed(layer)
            return output

        return noting


@outside_of_graphs
def _check_recomputed(layer: RoutedLayer) -> None:
    if not in_backward():
        raise InputError(
            f"the router of layer {layer.layer} ran outside of a call of the model that is "
            "recorded; pass the model that is called to record, compiled where it is"
        )
