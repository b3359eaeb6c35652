"""Questions about the backward pass for which torch has no public answer."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def next_number() -> int:
    """Return the number that the next node of the graph gets in this thread; numbers rise."""
    return int(torch._C._autograd._get_sequence_nr())


def running_number() -> int:
    """Return the number of the node whose backward runs."""
    node = torch._C._current_autograd_node()
    return int(node._sequence_nr())


def outside_of_graphs(function: F) -> F:
    """Wrap a function so that torch.compile calls it and does not trace it."""
    wrapped: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return wrapped
