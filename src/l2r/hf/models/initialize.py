"""Initial weights of routers inside Hugging Face models.

Routers draw from a separate random stream, so that models that differ in the router alone
start from the same weights everywhere else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from l2r.routers import Router, RouterConfig, build_router

_STREAM_STEP = 1_000_003  # keeps the streams of neighboring seeds and layers apart


def attach_router(config: RouterConfig, *, stream: int, **sizes: int) -> Router:
    """Build the router of layer ``stream`` without advancing the global random state."""
    with _stream(stream):
        router = build_router(config, **sizes)
    router.init_stream = stream  # type: ignore[assignment]
    for child in router.modules():
        if child is not router:
            child._is_hf_initialized = True  # type: ignore[assignment]  # reset_missing does it
    return router


@torch.no_grad()
def reset_missing(router: Router) -> None:
    """Initialize a router after loading, leaving alone what the checkpoint filled.

    A selection bias starts at zero, also one that a swap brought from the family's router.
    """
    state: dict[str, Any] = dict(router.named_parameters()) | dict(router.named_buffers())
    loaded = {n: t.clone() for n, t in state.items() if getattr(t, "_is_hf_initialized", False)}
    if len(loaded) == len(state):
        return
    with _stream(int(getattr(router, "init_stream", 0))):
        router.reset_parameters()
    if router.selection.bias is not None:
        state[router.selection.bias].zero_()
    for name, value in loaded.items():
        state[name].copy_(value)


_watchers: list[Callable[[nn.Module], None]] = []


@contextmanager
def watch_initialized(call: Callable[[nn.Module], None]) -> Iterator[None]:
    """Call ``call(module)`` of each module of our models inside the block, its weights drawn.

    It may take the weights away: nothing reads them before the model is whole.
    """
    _watchers.append(call)
    try:
        yield
    finally:
        _watchers.remove(call)


def tell_initialized(module: nn.Module) -> None:
    """Tell who watches that a module has its initial weights."""
    for call in _watchers:
        call(module)


@contextmanager
def _stream(index: int) -> Iterator[None]:
    seed = (torch.initial_seed() + (index + 1) * _STREAM_STEP) % 2**63
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
