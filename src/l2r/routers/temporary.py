"""Hooks and functions that stand on modules for a while, and that no copy of a module has.

Hooks of a block belong to the block and the model that it got. A copy, a pickle or what torch.save
writes of a model inside the block is what it would be outside: without them, without the block's
records, and with its own routers called. Blocks on one model may end in any order.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.hooks import RemovableHandle

_NOTHING = object()
_REDUCE = "__reduce_ex__"  # by which copy and pickle take an object apart; they ask the instance


@dataclass
class _Temporary:
    """Attributes and hooks that stand on a module for a while.

    values: by name what the instance had before the first block, or ``_NOTHING``, and the value of
    each open block. hooks: numbers of hooks.
    """

    values: dict[str, list[Any]] = field(default_factory=dict)
    hooks: set[int] = field(default_factory=set)


_OF_MODULES: WeakKeyDictionary[Any, _Temporary] = WeakKeyDictionary()


@contextmanager
def replaced(values: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Set attributes of instances, mostly modules, inside the block; what was there comes back.

    Blocks on one model may end in any order: the value of the last that is open stays. A function
    may call the one before it after that one's block.
    torch.compile guards what an instance has under ``forward``, and no forward hooks.
    """
    put: list[tuple[Any, str, Any]] = []
    try:
        for (module, name), value in values.items():
            stack = _on(module).values.setdefault(name, [vars(module).get(name, _NOTHING)])
            stack.append(value)
            put.append((module, name, value))
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in put:
            here = _OF_MODULES.get(module)
            if here is None:  # the module is gone, and a block that nobody closed ends with it
                continue
            stack = here.values[name]
            _drop(stack, value)
            if stack[-1] is _NOTHING:
                delattr(module, name)
            else:
                setattr(module, name, stack[-1])
            if len(stack) == 1:
                del here.values[name]
            _clear(module, here)


@contextmanager
def removing(handles: Mapping[RemovableHandle, nn.Module]) -> Iterator[None]:
    """Remove hooks, each from its module, at the end of the block; no copy has them until then."""
    for handle, module in handles.items():
        _on(module).hooks.add(handle.id)
    try:
        yield
    finally:
        for handle, module in handles.items():
            handle.remove()
            here = _OF_MODULES.get(module)
            if here is not None:
                here.hooks.discard(handle.id)
                _clear(module, here)


def _on(module: Any) -> _Temporary:
    found = _OF_MODULES.get(module)
    if found is None:
        found = _OF_MODULES[module] = _Temporary()
        vars(module)[_REDUCE] = partial(_reduce, module)
    return found


def _drop(stack: list[Any], value: Any) -> None:
    """Remove the last entry that is this object: two blocks may have set equal ones."""
    last = max(place for place, other in enumerate(stack) if other is value and place)
    del stack[last]


def _clear(module: Any, here: _Temporary) -> None:
    if not here.values and not here.hooks:
        del _OF_MODULES[module]
        vars(module).pop(_REDUCE, None)


def _reduce(module: Any, protocol: Any) -> Any:
    """Return what ``__reduce_ex__`` of the class gives, without what stands here for a while."""
    kind: Any = type(module)
    parts = kind.__reduce_ex__(module, protocol)
    if len(parts) < 3 or not isinstance(parts[2], dict):
        return parts
    here, state = _OF_MODULES[module], dict(parts[2])
    del state[_REDUCE]
    for name, (first, *_) in here.values.items():
        state.pop(name, None)
        if first is not _NOTHING:
            state[name] = first
    for name, value in state.items():
        if "_hooks" in name and isinstance(value, dict) and here.hooks & value.keys():
            kept = {number: hook for number, hook in value.items() if number not in here.hooks}
            state[name] = type(value)(kept)
    return (*parts[:2], state, *parts[3:])
