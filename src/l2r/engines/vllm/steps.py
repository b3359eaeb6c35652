"""Experts of every request's tokens, from the steps of an engine that batches and caches.

A step forwards some tokens of several requests, in one row after another. Tokens whose keys and
values another request left in the cache are not forwarded again; their experts are those that the
slots of the cache were written with.

Shape letters: T tokens of a step, P tokens of a request so far, L hidden layers, K experts chosen.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from l2r.errors import InputError


class Scheduled(NamedTuple):
    """Tokens of a request in a step.

    first: position of the first, before which all are in the cache. tokens: how many. slots [P]:
    slot of the cache of each token from position 0 on, those of this step too.
    """

    name: str
    first: int
    tokens: int
    slots: Int[np.ndarray, " P"]


class Steps:
    """Experts by request and position; ``slots`` is the number of slots of the cache."""

    def __init__(self, layers: int, top_k: int, kind: type[np.generic], slots: int) -> None:
        self._shape, self._kind = (layers, top_k), kind
        self._by_slot = np.zeros((slots, layers, top_k), kind)  # memory as it is written
        self._written = np.zeros(slots, bool)
        self._requests: dict[str, list[tuple[int, np.ndarray, np.ndarray]]] = {}

    @property
    def names(self) -> list[str]:
        """Requests seen so far."""
        return list(self._requests)

    def add(self, requests: Sequence[Scheduled], experts: Int[np.ndarray, "T L K"]) -> None:
        """Note what a step forwarded, in the order of its rows.

        Raises ValueError where the rows are fewer than the tokens.
        """
        total = sum(request.tokens for request in requests)
        if len(experts) < total:
            raise InputError(f"a step of {total} tokens must have as many rows; got {len(experts)}")
        row = 0
        for name, first, count, slots in requests:
            rows = experts[row : row + count].astype(self._kind)
            row += count
            self._by_slot[slots[first:]] = rows
            self._written[slots[first:]] = True
            if name in self._requests:
                self._requests[name].append((first, rows, np.ones(count, bool)))
        # A prefix may be shared with a request of the same step.
        row = 0
        for name, first, count, slots in requests:
            if name not in self._requests:
                cached = slots[:first]
                self._requests[name] = [
                    (0, self._by_slot[cached], self._written[cached]),
                    (first, experts[row : row + count].astype(self._kind), np.ones(count, bool)),
                ]
            row += count

    def read(self, name: str) -> tuple[Int[np.ndarray, "P L K"], Bool[np.ndarray, " P"]]:
        """Experts of a request's tokens, and where they are known; what came last counts.

        Raises ValueError for a request that no step had.
        """
        if name not in self._requests:
            raise InputError(f"no step had a request {name!r}")
        parts = self._requests[name]
        end = max(first + len(rows) for first, rows, _ in parts)
        experts, known = np.zeros((end, *self._shape), self._kind), np.zeros(end, bool)
        for first, rows, seen in parts:
            place = slice(first, first + len(rows))
            experts[place], known[place] = rows, seen
        return experts, known

    def drop(self, name: str) -> None:
        """Forget a request; its slots stay known."""
        self._requests.pop(name, None)
