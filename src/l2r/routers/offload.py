"""Modules whose tensors accelerate keeps on another device or on disk until they run."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def device_of(module: nn.Module) -> torch.device:
    """Device that a module computes on, also where accelerate keeps its tensors elsewhere."""
    hooks = [part._hf_hook for part in module.modules() if hasattr(part, "_hf_hook")]
    for device in (getattr(hook, "execution_device", None) for hook in hooks):
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device


@contextmanager
def onloaded(module: nn.Module) -> Iterator[None]:
    """Have the tensors that accelerate has offloaded on their execution device inside the block.

    For whoever reads a module's parameters without calling it; nothing where nothing is offloaded.
    """
    hooks: list[tuple[nn.Module, Any]] = [
        (part, part._hf_hook) for part in module.modules() if hasattr(part, "_hf_hook")
    ]
    for part, hook in hooks:
        hook.pre_forward(part)
    try:
        yield
    finally:
        for part, hook in hooks:
            hook.post_forward(part, None)


def materialized(module: nn.Module) -> nn.Module:
    """Return the module, or where accelerate has offloaded its tensors a copy that has them.

    For whoever calls a module and reads its parameters too, such as a router's diagnosis.
    """
    hooks = [part._hf_hook for part in module.modules() if hasattr(part, "_hf_hook")]
    if not any(getattr(hook, "offload", False) for hook in hooks):
        return module
    from accelerate.hooks import remove_hook_from_module

    # Hooks are shared: they hold the whole model's tensors.
    shared: dict[int, Any] = {id(hook): hook for hook in hooks}
    with onloaded(module):
        return remove_hook_from_module(copy.deepcopy(module, shared), recurse=True)
