"""Read data with a model once, while any number of reducers look at its routers.

Shape letters: B sequences or images, S length, T tokens, D hidden size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from l2r.functional.autocast import without_autocast
from l2r.routers import RouterOutput
from l2r.routers.observe import evaluating, find_routers, watched

DataBatch = Mapping[str, Tensor]
Run = Callable[[nn.Module, dict[str, Tensor]], Any]


class BatchReading(NamedTuple):
    """One batch: the model's inputs by name, the domain [B] of each row, and the mask [B, S] of
    the tokens that count; None for either that the batch does not have."""

    inputs: dict[str, Tensor]
    domain: Tensor | None
    mask: Tensor | None

    @property
    def rows(self) -> int:
        """Number of sequences or images."""
        return len(next(iter(self.inputs.values())))


class RouterReducer:
    """Base class of what looks at routers; a subclass overrides what it needs."""

    def begin(self, reading: BatchReading) -> None:
        """Prepare for a batch that the model is about to read."""

    def see(self, x: Tensor, output: RouterOutput, where: str) -> None:
        """Reduce one call of the router named ``where``: its input [..., D] and its output."""

    def end(self, reading: BatchReading, output: Any) -> None:
        """Finish a batch, whose model output is given."""


def read(
    model: nn.Module,
    batches: Iterable[DataBatch],
    reducers: Sequence[RouterReducer],
    *,
    run: Run | None = None,
    report: Callable[[int], None] = lambda batches_done: None,
) -> None:
    """Run ``model`` on ``batches`` in evaluation mode, without gradients.

    A batch holds the model's inputs by name, and may hold ``domain`` [B] and ``token_mask``
    [B, S]; ``attention_mask`` [B, S] masks tokens as well. ``run`` calls the model in another way
    than ``model(**inputs)``. Reducers compute outside of autocast, in full precision.

    Raises ValueError for a model without routers.
    """
    call = run or (lambda module, inputs: module(**inputs))

    def see(x: Tensor, output: RouterOutput, where: str) -> None:
        with without_autocast(x.device):
            for reducer in reducers:
                reducer.see(x.detach(), output, where)

    with torch.no_grad(), evaluating(model), watched(find_routers(model), see):
        for done, batch in enumerate(batches, start=1):
            inputs = dict(batch)
            domain = inputs.pop("domain", None)
            mask = inputs.pop("token_mask", inputs.get("attention_mask"))
            reading = BatchReading(inputs, domain, mask)
            for reducer in reducers:
                reducer.begin(reading)
            output = call(model, inputs)
            for reducer in reducers:
                reducer.end(reading, output)
            report(done)
