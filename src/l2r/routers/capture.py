"""Record the outputs of every router of ours inside a model; the routers store nothing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.routers.base import Router, RouterOutput
from l2r.routers.observe import watched
from l2r.routers.temporary import removing, replaced


@dataclass
class Captured:
    """Router outputs by module name, one per forward call, in the order of the calls.

    ``inputs`` holds what each router saw (only with ``capture(model, inputs=True)``).
    """

    outputs: dict[str, list[RouterOutput]] = field(default_factory=dict)
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    routers: dict[str, Router] = field(default_factory=dict)

    def logits(self) -> list[Tensor]:
        """Logits [T, N] of every layer, calls after one another."""
        return [output.logits for calls in self.outputs.values() for output in calls]

    def indices(self) -> list[Tensor]:
        """Indices [T, K] of every layer, calls after one another."""
        return [output.indices for calls in self.outputs.values() for output in calls]

    def rankings(self) -> list[Tensor]:
        """Scores [T, N] of every layer by which experts were chosen; see ``Selection.ranking``."""
        return [
            self.routers[name].selection.ranking(self.routers[name], output.logits)
            for name, calls in self.outputs.items()
            for output in calls
        ]

    def heads(self) -> list[int]:
        """Anchors per expert of every layer, calls after one another."""
        return [self.routers[name].heads for name, calls in self.outputs.items() for _ in calls]


@contextmanager
def capture(model: nn.Module, *, inputs: bool = False) -> Iterator[Captured]:
    """Record the RouterOutput of every Router inside ``model`` during the ``with`` block.

    Outputs keep their graph, so losses computed from them train the routers. Close the block
    before ``backward`` when activation checkpointing is on: it runs the forward hooks again.
    Calls of other threads are not recorded. A compiled model is passed compiled: torch compiles
    anew for each further call in a block of the model inside, whose lists have another length.
    Raises ValueError if the model has no Router.
    """
    routers = {name: m for name, m in model.named_modules() if isinstance(m, Router)}
    if not routers:
        raise InputError(f"{type(model).__name__} contains no l2r Router to capture")
    record, thread = Captured(routers=routers), threading.get_ident()
    compiled = hasattr(model, "_orig_mod")
    call = Captured() if compiled else record  # a graph is guarded by the lengths of its lists

    def keep(x: Tensor, output: RouterOutput, name: str) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() != thread:
            return
        kept = call if torch.compiler.is_compiling() else record
        kept.outputs.setdefault(name, []).append(output)
        if inputs:
            kept.inputs.setdefault(name, []).append(x.detach())

    def add_call(*_: object) -> None:
        for new, known in ((call.outputs, record.outputs), (call.inputs, record.inputs)):
            for name, values in new.items():
                known.setdefault(name, []).extend(values)  # type: ignore[arg-type]
            new.clear()

    more = {model.register_forward_hook(add_call, always_call=True): model} if compiled else {}
    captures: dict[tuple[nn.Module, str], int] = {
        (router, "_captures"): router._captures + 1 for router in routers.values()
    }
    with removing(more), replaced(captures), watched(routers, keep):
        yield record
