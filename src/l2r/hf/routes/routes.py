"""Routes: the experts that every token chose in every layer, by sequence.

Shape letters: T tokens with a route, S sequences, W width of a padded batch, L layers with a
router, K experts chosen per token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from l2r.errors import InputError
from l2r.hf.routes.array_checks import (
    NO_ROUTE,
    check_experts,
    check_positions,
    check_whole_routes,
    whole_numbers,
)
from l2r.hf.routes.files import read_arrays, write_arrays
from l2r.hf.routes.fingerprint import Fingerprint

Side = Literal["left", "right"]
_ARRAYS = ("experts", "lengths", "counts", "positions")  # and weights, where recorded


class RouteAgreement(NamedTuple):
    """Share of equal choices, over ``compared`` tokens that both have a route for.

    layers [L]: share of tokens with the same set of experts in a layer. tokens: share of tokens
    with the same sets in all layers. Both are NaN when no token was compared.
    """

    layers: Float[np.ndarray, " L"]
    tokens: float
    compared: int


@dataclass(frozen=True, eq=False)
class Routes:
    """Experts of every token and layer, of several sequences one after another.

    experts [T, L, K]: stored as uint8 up to 256 experts, else uint16; the K keep their order.
    lengths [S]: tokens of each sequence, those without a route too (a sampled token that was
    never forwarded, a prefix that was not recorded). counts [S]: tokens with a route, None for
    all. positions [T]: place of each such token in its sequence, None for the first ``counts``.
    weights [T, L, K]: of the experts' outputs, None where they were not recorded.

    Raises ValueError for arrays that do not fit together, for experts out of range and for an
    expert that a token chose twice in one layer.
    """

    experts: Int[np.ndarray, "T L K"]
    fingerprint: Fingerprint
    lengths: Int[np.ndarray, " S"]
    counts: Int[np.ndarray, " S"] = None  # type: ignore[assignment]
    positions: Int[np.ndarray, " T"] = None  # type: ignore[assignment]
    weights: Float[np.ndarray, "T L K"] | None = None

    def __post_init__(self) -> None:
        lengths = whole_numbers("lengths", self.lengths)
        counts = lengths if self.counts is None else whole_numbers("counts", self.counts)
        if counts.shape != lengths.shape or (counts > lengths).any():
            raise InputError(
                f"counts must say for each of the {len(lengths)} sequences how many of its tokens "
                f"have a route; got counts={counts.tolist()}, lengths={lengths.tolist()}"
            )
        experts = np.asarray(self.experts)
        f = self.fingerprint
        shape = (int(counts.sum()), len(f.layers), f.top_k)
        if experts.shape != shape or experts.dtype.kind not in "iu":
            raise InputError(
                f"experts must be whole numbers of shape [tokens, layers, k] = {list(shape)}; "
                f"got {experts.dtype} of shape {list(experts.shape)}"
            )
        if self.positions is None:
            positions = np.concatenate([np.arange(0), *map(np.arange, counts.tolist())])
        else:
            positions = whole_numbers("positions", self.positions)
            check_positions(positions, counts, lengths)
        check_experts(experts, f)
        weights = self.weights
        if weights is not None:
            weights = np.asarray(weights, dtype=np.float32)
            if weights.shape != shape:
                raise InputError(
                    f"weights must have the shape of experts, {list(shape)}; "
                    f"got {list(weights.shape)}"
                )
        small = np.uint8 if f.num_experts <= 256 else np.uint16
        values = (experts.astype(small, copy=False), lengths, counts, positions, weights)
        for name, value in zip((*_ARRAYS, "weights"), values, strict=True):
            object.__setattr__(self, name, value)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers that have a router, in the order of ``experts``."""
        return self.fingerprint.layers

    @cached_property
    def ends(self) -> Int[np.ndarray, " S1"]:
        """Row at which each sequence begins, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def __iter__(self) -> Iterator["Routes"]:
        """One sequence after another."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: int | slice | Sequence[int]) -> "Routes":
        """Sequences by number, slice or list of numbers, in that order.

        Raises IndexError for a number that no sequence has.
        """
        chosen = np.atleast_1d(np.arange(len(self))[key])
        rows = [np.arange(self.ends[s], self.ends[s + 1]) for s in chosen]
        return self._rows(
            np.concatenate([np.arange(0), *rows]), self.lengths[chosen], self.counts[chosen]
        )

    def __eq__(self, other: object) -> bool:
        """Whether all is equal: experts in their order, sequences, fingerprint and weights."""
        if not isinstance(other, Routes):
            return NotImplemented
        pairs = [(getattr(self, name), getattr(other, name)) for name in _ARRAYS]
        if (self.weights is None) != (other.weights is None):
            return False
        if self.weights is not None:
            pairs.append((self.weights, other.weights))
        return self.fingerprint == other.fingerprint and all(np.array_equal(*p) for p in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        f = self.fingerprint
        return (
            f"Routes({len(self)} sequences, {len(self.experts)} tokens, {len(f.layers)} layers, "
            f"{f.top_k} of {f.num_experts} experts)"
        )

    def extended(self, tokens: int = 1) -> "Routes":
        """The same with ``tokens`` more at the end of every sequence, which have no route.

        What is sampled last is never forwarded and has no route; training reads it all the same.
        Raises ValueError for a negative number.
        """
        if tokens < 0:
            raise InputError(f"tokens must be >= 0; got tokens={tokens}; see truncated")
        return replace(self, lengths=self.lengths + tokens)

    def truncated(self, length: int) -> "Routes":
        """The first ``length`` tokens of every sequence. Raises ValueError for a negative one."""
        if length < 0:
            raise InputError(f"length must be >= 0; got length={length}")
        rows = np.flatnonzero(self.positions < length)
        counts = np.bincount(self.sequence_of_rows[rows], minlength=len(self))
        return self._rows(rows, np.minimum(self.lengths, length), counts)

    def with_fingerprint(self, fingerprint: Fingerprint) -> "Routes":
        """Return them with another model's fingerprint. Raises ValueError where sizes differ."""
        return replace(self, fingerprint=fingerprint)

    @cached_property
    def sequence_of_rows(self) -> Int[np.ndarray, " T"]:
        """Sequence of each token with a route."""
        return np.repeat(np.arange(len(self)), self.counts)

    def agreement(self, other: "Routes") -> RouteAgreement:
        """Share of tokens that chose the same sets of experts in both, by layer and in all.

        Tokens without a route in one of them do not count. Raises ValueError unless both have
        the same sizes and sequences of the same lengths.
        """
        self.fingerprint.check(other.fingerprint)
        if not np.array_equal(self.lengths, other.lengths):
            raise InputError(
                "routes that are compared must have sequences of the same lengths; "
                f"got {self.lengths.tolist()} and {other.lengths.tolist()}"
            )
        starts = np.cumsum(self.lengths) - self.lengths
        mine, others = (r.positions + starts[r.sequence_of_rows] for r in (self, other))
        _, ours, theirs = np.intersect1d(mine, others, assume_unique=True, return_indices=True)
        sets = np.sort(self.experts[ours], axis=-1) == np.sort(other.experts[theirs], axis=-1)
        same = sets.all(axis=-1)
        if not len(same):
            return RouteAgreement(np.full(len(self.layers), np.nan), float("nan"), 0)
        return RouteAgreement(same.mean(axis=0), float(same.all(axis=1).mean()), len(same))

    def padded(
        self, side: Side = "right", width: int | None = None
    ) -> tuple[Int[Tensor, "S W L K"], Bool[Tensor, "S W"]]:
        """Routes of a padded batch, int64 with -1 where a token has none, and the mask of tokens.

        The mask is True where a sequence has a token, with a route or without. Raises ValueError
        for a width below the longest sequence.
        """
        rows, mask = self._grid(side, width)
        table = np.concatenate([self.experts.astype(np.int64), np.full_like(self._one, NO_ROUTE)])
        return torch.from_numpy(table[rows]), torch.from_numpy(mask)

    @classmethod
    def from_padded(cls, experts: Tensor, mask: Tensor, fingerprint: Fingerprint) -> "Routes":
        """The inverse of ``padded``: experts [S, W, L, K], -1 for a token without a route, and
        the mask [S, W] of tokens. Raises ValueError for other shapes and for a token with -1 in
        some places only.
        """
        values, tokens = np.asarray(experts), np.asarray(mask).astype(bool)
        if values.ndim != 4 or values.shape[:2] != tokens.shape:
            raise InputError(
                "experts must be [sequences, width, layers, k] and mask [sequences, width]; "
                f"got {list(values.shape)} and {list(tokens.shape)}"
            )
        check_whole_routes(values, tokens, fingerprint)
        has = tokens & (values != NO_ROUTE).all(axis=(2, 3))
        places = np.cumsum(tokens, axis=1) - 1
        return cls(values[has], fingerprint, tokens.sum(1), has.sum(1), places[has])

    def save(self, path: str | Path, *, rows: Iterable[Int[Tensor, " N"]] | None = None) -> None:
        """Write a safetensors file, whole or not at all.

        rows: token ids of each sequence; ``l2r mismatch`` then refuses routes of other tokens.
        """
        arrays = {name: getattr(self, name) for name in (*_ARRAYS, "weights")}
        write_arrays(Path(path), arrays, self.fingerprint.to_json(), rows)

    @classmethod
    def load(cls, path: str | Path) -> "Routes":
        """Read what ``save`` wrote. Raises ValueError, in one line, for any other file."""
        try:
            arrays, fingerprint = read_arrays(Path(path), _ARRAYS, ("weights",))
            return cls(fingerprint=Fingerprint.from_values(fingerprint), **arrays)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"cannot read routes from {path}: {error}") from error

    @classmethod
    def concatenate(cls, parts: Sequence["Routes"]) -> "Routes":
        """Sequences of several routes of one model, one after another.

        Raises ValueError for none, for other fingerprints and where some have weights.
        """
        if not parts:
            raise InputError("routes to concatenate must be at least 1; got 0")
        for part in parts[1:]:
            if part.fingerprint != parts[0].fingerprint:
                raise InputError(
                    "routes to concatenate must have one fingerprint; "
                    f"got {parts[0].fingerprint} and {part.fingerprint}"
                )
        weights = [part.weights for part in parts if part.weights is not None]
        if len(weights) not in (0, len(parts)):
            raise InputError(
                f"routes to concatenate must all have weights, or none; {len(weights)} of "
                f"{len(parts)} have"
            )
        joined = [np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS]
        experts, lengths, counts, positions = joined
        together = np.concatenate(weights) if weights else None
        return cls(experts, parts[0].fingerprint, lengths, counts, positions, together)

    @property
    def _one(self) -> np.ndarray:
        return np.zeros((1, *self.experts.shape[1:]), np.int64)

    def _rows(self, rows: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> "Routes":
        weights = None if self.weights is None else self.weights[rows]
        return Routes(
            self.experts[rows], self.fingerprint, lengths, counts, self.positions[rows], weights
        )

    def _grid(
        self, side: str, width: int | None
    ) -> tuple[Int[np.ndarray, "S W"], Bool[np.ndarray, "S W"]]:
        """Row of each place of a padded batch, -1 where there is none, and the mask of tokens."""
        if side not in ("left", "right"):
            raise InputError(f"side must be left or right; got side={side!r}")
        longest = int(self.lengths.max(initial=0))
        if width is None:
            width = longest
        if width < longest:
            raise InputError(
                f"width must be at least {longest}, the longest sequence; got width={width}"
            )
        start = width - self.lengths if side == "left" else np.zeros_like(self.lengths)
        columns = np.arange(width)
        mask = (columns >= start[:, None]) & (columns < (start + self.lengths)[:, None])
        rows = np.full(mask.shape, NO_ROUTE)
        sequence = self.sequence_of_rows
        rows[sequence, start[sequence] + self.positions] = np.arange(len(self.experts))
        return rows, mask
