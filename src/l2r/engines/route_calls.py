"""Calls of an engine's model, and the choices of its routers in them.

Shape letters: B rows of a call, W its columns, w columns on this rank, K experts per token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.hf.routes import in_backward, next_number, outside_of_graphs, running_number


class Part(NamedTuple):
    """Index of this rank's piece among ``ranks`` equal pieces of every row, and their group."""

    rank: int = 0
    ranks: int = 1
    group: Any = None


WHOLE = Part()
# A router's own choice to what it must take: [B, w, K], or [w * B, K] with the rows innermost.
Choose = Callable[[Tensor, Part], Tensor]


@dataclass(frozen=True)
class Seat:
    """An attribute of ``owner``, and what to put there so that a router asks which experts to take.

    ``make`` gets the question, and gives what answers as the one that stood there.
    """

    owner: Any
    name: str
    make: Callable[[Choose], Any]


class Call(NamedTuple):
    """Rows and columns of a call of the model, and the number of its first sequence."""

    rows: int
    columns: int
    first: int


class Calls(ABC):
    """Calls of a model one after another; a layer that is computed again belongs to its own.

    A call that fails leaves its sequences to the next.
    """

    def __init__(self) -> None:
        self.sequences = 0
        self._now: Call | None = None
        self._first_node = 0
        self._spans: list[tuple[range, Call]] = []  # nodes of the graph of a call

    @outside_of_graphs
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of the model."""
        rows, columns = _shape([*args, *kwargs.values()])
        self._check(Call(rows, columns, self.sequences))
        self._now, self._first_node = Call(rows, columns, self.sequences), next_number()

    @outside_of_graphs
    def keep(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Count the rows of a call that succeeded."""
        if self._now is not None:
            self.sequences += self._now.rows

    @outside_of_graphs
    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End a call; its backward pass may follow."""
        if self._now is not None and next_number() > self._first_node:
            self._spans.append((range(self._first_node, next_number()), self._now))
        self._now = None

    def ask(self, layer: int, own: Tensor, part: Part) -> Tensor:
        """Experts that a router uses in place of its choice ``own``; see ``Choose``."""
        call = self._running()
        if call is None:
            return own
        if own.ndim == 3:
            return self._choose(call, layer, own, part)
        grid = own.view(-1, call.rows, own.shape[-1]).transpose(0, 1)
        return self._choose(call, layer, grid, part).transpose(0, 1).reshape(own.shape)

    @outside_of_graphs
    def _running(self) -> Call | None:
        """The call that runs, or whose backward pass computes a layer again; None for another's.

        Raises ValueError where a router runs outside of both.
        """
        if self._now is not None:
            return self._now
        if not in_backward():
            raise InputError(
                "a router ran outside of a call of the model; pass the model that is called"
            )
        number = running_number()
        return next((call for nodes, call in self._spans if number in nodes), None)

    @abstractmethod
    def _check(self, call: Call) -> None:
        """Raise ValueError where a call cannot be served."""

    @abstractmethod
    def _choose(
        self, call: Call, layer: int, own: Int[Tensor, "B w K"], part: Part
    ) -> Int[Tensor, "B w K"]: ...


def _shape(values: Sequence[Any]) -> tuple[int, int]:
    """Rows and columns of a call: of token ids [B, W], or of hidden states [B, W, D]."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    for tensor in tensors:
        if tensor.ndim == 2 and not tensor.is_floating_point():
            return tensor.shape[0], tensor.shape[1]
    for tensor in tensors:
        if tensor.ndim == 3:
            return tensor.shape[0], tensor.shape[1]
    raise InputError("a call must have token ids [rows, columns] to find its routes")
