"""Every model of a test inside a block of ours: recorded, replayed or captured."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import wraps
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

BLOCKS = ("recorded", "replayed", "captured", "observed")


@contextmanager
def around_every_model(mode: str, kinds: Sequence[Any]) -> Iterator[None]:
    """Open a block around each model of ``kinds`` that is made or loaded meanwhile.

    recorded, captured, observed: from then on until the end. replayed: around each call, with the
    routes that the same call took before.
    """
    with ExitStack() as patches, ExitStack() as opened:
        if mode == "replayed":
            running = [False]  # a model calls the one inside it
            for kind in kinds:
                call = _replaying(kind.__call__, running)
                patches.enter_context(mock.patch.object(kind, "__call__", call))
        else:
            _open_when_made(kinds, _opener(mode, opened), patches)
        yield


def _opener(mode: str, opened: ExitStack) -> Callable[[Any], None]:
    from l2r import capture, record

    block = record if mode == "recorded" else capture

    def open_around(model: Any) -> None:
        opened.enter_context(block(model))

    return open_around


def _open_when_made(
    kinds: Sequence[Any], open_around: Callable[[Any], None], patches: ExitStack
) -> None:
    depth = [0]  # models are made inside of models, and inside of from_pretrained

    def counting(make: Callable[..., Any], made: Callable[[Any, Any], Any]) -> Any:
        @wraps(make)
        def making(subject: Any, *args: Any, **options: Any) -> Any:
            depth[0] += 1
            try:
                result = make(subject, *args, **options)
            finally:
                depth[0] -= 1
            if not depth[0]:
                open_around(made(subject, result))
            return result

        return making

    for kind in kinds:
        init = counting(kind.__init__, lambda model, _: model)
        patches.enter_context(mock.patch.object(kind, "__init__", init))
    load = counting(
        PreTrainedModel.from_pretrained.__func__,
        lambda _, result: result[0] if isinstance(result, tuple) else result,
    )
    patches.enter_context(mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(load)))


def _own(values: Any) -> Any:
    """A copy of what a model is called with; tensors of a graph are leaves of none."""
    if isinstance(values, torch.Tensor):
        return values.detach().clone()
    if isinstance(values, tuple | list):
        return type(values)(map(_own, values))
    if isinstance(values, dict):
        return {name: _own(value) for name, value in values.items()}
    return deepcopy(values)


def _replaying(call: Callable[..., Any], running: list[bool]) -> Callable[..., Any]:
    """A call of a model that takes the experts that the same call took before."""
    from l2r import record, replay

    @wraps(call)
    def calling(model: Any, *args: Any, **options: Any) -> Any:
        if running[0]:
            return call(model, *args, **options)
        running[0] = True
        try:
            state = torch.get_rng_state()
            with record(model) as recorder, torch.no_grad():
                call(model, *_own(args), **_own(options))
            torch.set_rng_state(state)
            with replay(model, recorder.routes()):
                return call(model, *args, **options)
        finally:
            running[0] = False

    return calling
