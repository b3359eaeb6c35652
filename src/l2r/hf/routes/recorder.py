"""Record which experts a model chooses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.hf.routes.backward_pass import outside_of_graphs
from l2r.hf.routes.calls import Calls, Inputs, Places, read_inputs
from l2r.hf.routes.choices import Choices
from l2r.hf.routes.fingerprint import Fingerprint
from l2r.hf.routes.routes import Routes
from l2r.routers.temporary import removing, replaced


class Recorder:
    """Routes of the calls of a model; see ``record``."""

    def __init__(self, model: nn.Module, *, weights: bool, tokenizer: Any) -> None:
        self._choices = Choices(model, tokenizer, weights=weights)
        self._keeps_weights = weights
        self._inputs: Inputs | None = None
        self._calls = Calls()
        self._parts: list[tuple[Places, Tensor, Tensor | None]] = []

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the model."""
        return self._choices.fingerprint

    def routes(self) -> Routes:
        """All that was recorded so far; a token that was read twice has its last route.

        Raises ValueError before the first call.
        """
        if not self._parts:
            raise InputError("nothing was recorded yet; call the model inside the block")
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
            masks = [part[2] for part in self._parts if part[2] is not None]
            weights = np.concatenate([part.float().cpu().numpy() for part in masks])[rows]
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
        experts = self._choices.experts()
        if self._calls.continues(inputs):
            places = self._calls.go_on(inputs)
        elif inputs.packed is not None:
            places = self._calls.begin_packed(inputs.packed)
        else:
            columns = inputs.columns or len(experts) // max(1, inputs.rows)
            places = self._calls.begin(inputs, columns)
        if len(places.token) != len(experts):
            raise InputError(
                f"routers must see every input of the model; it got {len(places.token)} and they "
                f"saw {len(experts)}"
            )
        weights = self._choices.weights() if self._keeps_weights else None
        self._parts.append((places, experts, weights))

    @outside_of_graphs
    def close(self, *call: Any) -> None:
        """Record nothing more, whether the call succeeded or not."""
        self._choices.close()

    def leave(self) -> None:
        """End the block."""
        self._choices.end()

    def forwards(self) -> dict[tuple[nn.Module, str], Callable[..., Any]]:
        """A forward that records for every router."""
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
