"""Record which experts a model chooses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l2r.hf.routes.backward import in_backward, outside_of_graphs
from l2r.hf.routes.calls import Calls, Inputs, Places, read_inputs
from l2r.hf.routes.layers import RoutedLayer, fingerprint_of, replaced, routed_layers
from l2r.hf.routes.routes import Routes
from l2r.routers.observe import routed


class _Seen:
    """What the router of a layer chose in the call that runs."""

    indices: Tensor | None = None
    weights: Tensor | None = None


class Recorder:
    """Routes of the calls of a model; see ``record``."""

    def __init__(self, model: nn.Module, *, weights: bool, tokenizer: Any) -> None:
        self.fingerprint = fingerprint_of(model, tokenizer)
        self._layers = routed_layers(model)
        self._keeps_weights = weights
        self._seen = [_Seen() for _ in self._layers]
        self._open = False
        self._inputs: Inputs | None = None
        self._calls = Calls()
        self._parts: list[tuple[Places, Tensor, Tensor | None]] = []

    def routes(self) -> Routes:
        """All that was recorded so far; a token that was read twice has its last route.

        Raises ValueError before the first call.
        """
        if not self._parts:
            raise ValueError("nothing was recorded yet; call the model inside the block")
        sequence = np.concatenate([part[0].sequence for part in self._parts])
        token = np.concatenate([part[0].token for part in self._parts])
        experts = np.concatenate([part[1].cpu().numpy() for part in self._parts])
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
            kept = [part[2] for part in self._parts if part[2] is not None]
            weights = np.concatenate([part.float().cpu().numpy() for part in kept])[rows]
        return Routes(experts[rows], self.fingerprint, lengths, counts, token[rows], weights)

    def forwards(self) -> dict[tuple[nn.Module, str], Callable[..., Any]]:
        """A forward that records for every router."""
        pairs = zip(self._layers, self._seen, strict=True)
        return {
            (site.router, "forward"): self._recording(layer, site.router, seen)
            for layer, seen in pairs
            for site in layer.sites
        }

    @outside_of_graphs
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the shape of a call."""
        self._inputs = read_inputs(model, args, kwargs)
        for seen in self._seen:
            seen.indices = seen.weights = None
        self._open = True

    @outside_of_graphs
    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep what the routers chose in a call."""
        inputs = self._inputs
        assert inputs is not None
        experts, weights = [], []
        for layer, seen in zip(self._layers, self._seen, strict=True):
            if seen.indices is None or seen.weights is None:
                raise ValueError(
                    f"the router of layer {layer.layer} ({layer.sites[0].path}) was not called"
                )
            experts.append(seen.indices)
            weights.append(seen.weights)
        small = torch.uint8 if self.fingerprint.num_experts <= 256 else torch.int32
        together = torch.stack([e.to(experts[0].device) for e in experts], dim=1).to(small)
        kept = None
        if self._keeps_weights:
            kept = torch.stack([w.to(weights[0].device) for w in weights], dim=1)
        if self._calls.continues(inputs):
            places = self._calls.go_on(inputs)
        elif inputs.packed is not None:
            places = self._calls.begin_packed(inputs.packed)
        else:
            columns = inputs.columns or len(together) // max(1, inputs.rows)
            places = self._calls.begin(inputs, columns)
        if len(places.token) != len(together):
            raise ValueError(
                f"routers must see every input of the model; it got {len(places.token)} and they "
                f"saw {len(together)}"
            )
        self._parts.append((places, together, kept))

    @outside_of_graphs
    def close(self, *call: Any) -> None:
        """Record nothing more, whether the call succeeded or not."""
        self._open = False

    def _recording(self, layer: RoutedLayer, router: nn.Module, seen: _Seen) -> Callable[..., Any]:
        forward = router.forward

        def recording(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self._open:
                _, weights, indices = routed(router, output)
                if seen.indices is not None:
                    raise ValueError(
                        f"the router of layer {layer.layer} was called twice in a call"
                    )
                seen.indices, seen.weights = indices.detach(), weights.detach()
            else:
                _check_recomputed(layer)
            return output

        return recording


@contextmanager
def record(model: nn.Module, *, weights: bool = False, tokenizer: Any = None) -> Iterator[Recorder]:
    """Record the experts that ``model`` chooses inside the block.

    ``with record(model) as recorder: model(...)``; then ``recorder.routes()``. Every call adds
    its sequences: the rows of a padded batch by their 2-D ``attention_mask``, packed sequences by
    ``position_ids``; a call with a cache continues those of the call before. Layers that a
    backward pass recomputes are not recorded again. A compiled model is passed compiled.

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
        with replaced(recorder.forwards()):
            yield recorder
    finally:
        for hook in hooks:
            hook.remove()


@outside_of_graphs
def _check_recomputed(layer: RoutedLayer) -> None:
    if not in_backward():
        raise ValueError(
            f"the router of layer {layer.layer} ran outside of a call of the model that is "
            "recorded; pass the model that is called to record, compiled where it is"
        )
