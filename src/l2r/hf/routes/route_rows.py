"""Which rows of routes the calls of a model read, call after call.

Shape letters: T inputs of a router, B rows of a batch, S sequences of the routes.
"""

from copy import copy

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from l2r.errors import InputError
from l2r.hf.routes.array_checks import NO_ROUTE
from l2r.hf.routes.calls import Calls, Inputs, Places
from l2r.hf.routes.routes import Routes


class Reading:
    """Sequences of routes in their order, each read by one call and those that continue it.

    A call that is not ``keep``-ed leaves them as they were.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._calls = self._next = Calls()  # before the call that runs, and after it
        self._table = _row_table(routes)

    @property
    def remaining(self) -> int:
        """Sequences that no call has read yet."""
        return len(self._routes) - self._calls.sequences

    def rows(self, inputs: Inputs) -> Int[np.ndarray, " T"]:
        """Row of the routes of each input of a call, the one after the last where it has none.

        Raises ValueError where the call does not fit the sequences.
        """
        self._next = copy(self._calls)
        if self._next.continues(inputs):
            return self._rows_of(self._next.go_on(inputs))
        return self._rows_of(self._new_places(inputs))

    def keep(self) -> None:
        """The call whose rows were asked for last has succeeded: its sequences are read."""
        self._calls = self._next

    def _new_places(self, inputs: Inputs) -> Places:
        """Places of a call with new sequences. Raises ValueError where they do not fit them."""
        first = self._calls.sequences
        left = self._routes.lengths[first:]
        size = inputs.rows * (inputs.columns or 0)
        if inputs.packed is not None:
            count = len(inputs.packed)
            _check_lengths(inputs.packed, left, first)
            return self._next.begin_packed(left[:count])
        if inputs.mask is None and not inputs.grows and not _one_a_row(inputs, left):
            count = int(np.searchsorted(np.cumsum(left), size)) + 1
            _check_filled(left[:count], inputs, first)
            return self._next.begin_packed(left[:count])
        _check_left(inputs.rows, left, first)
        if not inputs.grows:
            columns = inputs.columns
            counts = np.full(inputs.rows, left[:1].sum() if columns is None else columns)
            _check_lengths(counts if inputs.mask is None else inputs.mask.sum(axis=1), left, first)
        return self._next.begin(inputs, inputs.columns or int(left[:1].sum()))

    def _rows_of(self, places: Places) -> Int[np.ndarray, " T"]:
        """Row of the routes of each input, the one after the last where it has none."""
        none = len(self._routes.experts)
        if not len(self._routes):
            return np.full(len(places.token), none)
        lengths = self._routes.lengths
        inside = (places.token >= 0) & (places.token < lengths[places.sequence])
        start = np.cumsum(lengths) - lengths
        at = np.where(inside, start[places.sequence] + places.token, len(self._table) - 1)
        return self._table[at]


def _row_table(routes: Routes) -> Int[np.ndarray, " tokens"]:
    """Row of every token of every sequence, and one more, of no token."""
    none = len(routes.experts)
    table = np.full(int(routes.lengths.sum()) + 1, none)
    start = np.cumsum(routes.lengths) - routes.lengths
    table[start[routes.sequence_of_rows] + routes.positions] = np.arange(none)
    return table


def _one_a_row(inputs: Inputs, left: Int[np.ndarray, " S"]) -> bool:
    rows, columns = inputs.rows, inputs.columns
    return columns is None or (len(left) >= rows and bool((left[:rows] == columns).all()))


def _check_filled(lengths: Int[np.ndarray, " S"], inputs: Inputs, first: int) -> None:
    """Raise ValueError unless each row of a call without a mask is whole sequences."""
    rows, columns = inputs.rows, inputs.columns or 0
    borders = np.arange(1, rows + 1) * columns
    if not np.isin(borders, np.cumsum(lengths)).all() or lengths.sum() != rows * columns:
        raise InputError(
            f"whole sequences must fill the rows of a call without padding, {rows} of {columns} "
            f"tokens; from number {first} on they have {lengths.tolist()!s:.60} tokens. Pass a "
            "2-D attention_mask where there is padding; what was sampled last has no route, see "
            "Routes.extended"
        )


def _check_lengths(counts: Int[np.ndarray, " B"], left: Int[np.ndarray, " S"], first: int) -> None:
    """Raise ValueError unless the sequences of a call have as many tokens as in the routes."""
    _check_left(len(counts), left, first)
    for number, (count, length) in enumerate(zip(counts, left, strict=False), start=first):
        if count != length:
            raise InputError(
                f"a sequence must have as many tokens as its routes; sequence {number} has "
                f"{count} in the call and {length} in the routes. What was sampled last has no "
                "route, see Routes.extended"
            )


def _check_left(count: int, left: Int[np.ndarray, " S"], first: int) -> None:
    if len(left) < count:
        raise InputError(
            f"a call reads {count} sequences; {len(left)} of the routes' {first + len(left)} are "
            "left"
        )


def with_none(values: np.ndarray) -> Tensor:
    """A tensor with one row more, of NO_ROUTE."""
    none = np.full((1, *values.shape[1:]), NO_ROUTE, values.dtype)
    return torch.from_numpy(np.concatenate([values, none]))
