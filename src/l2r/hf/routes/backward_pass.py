"""Questions about the backward pass for which torch has no public answer."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def in_backward() -> bool:
    """Whether this thread runs a backward pass; a layer that runs now is recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def next_number() -> int:
    """Number that the next node of the graph will get in this thread; they rise."""
    return int(torch._C._autograd._get_sequence_nr())


def running_number() -> int:
    """Number of the node whose backward runs."""
    node = torch._C._current_autograd_node()
    return int(node._sequence_nr())


def outside_of_graphs(function: F) -> F:
    """Wrap a function so that torch.compile calls it and does not trace it."""
    wrapped: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return wrapped
