"""Routes: the experts that every token chose in every layer, by sequence; their checks and files.

Shape letters: T tokens with a route, S sequences, W width of a padded batch, L layers with a
router, K experts chosen per token.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes
from torch import Tensor

from l2r.errors import InputError
from l2r.files.atomic import write_bytes
from l2r.files.reading import parse_json, refuse_endless
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
        """Return the number of sequences."""
        return len(self.lengths)

    def __iter__(self) -> Iterator["Routes"]:
        """Iterate over the sequences."""
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
        """Say whether all is equal: experts in their order, sequences, fingerprint and weights."""
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
        """Return the same with ``tokens`` more at the end of every sequence, which have no route.

        What is sampled last is never forwarded and has no route; training reads it all the same.
        Raises ValueError for a negative number.
        """
        if tokens < 0:
            raise InputError(f"tokens must be >= 0; got tokens={tokens}; see truncated")
        return replace(self, lengths=self.lengths + tokens)

    def truncated(self, length: int) -> "Routes":
        """Keep the first ``length`` tokens of every sequence. Raises ValueError if negative."""
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
        """Invert ``padded``: experts [S, W, L, K], -1 for a token without a route, and
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


NO_ROUTE = -1  # in padded arrays: the token chooses for itself


def whole_numbers(name: str, values: Any) -> Int[np.ndarray, " S"]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size) or (array < 0).any():
        raise InputError(
            f"{name} must be a list of whole numbers >= 0; "
            f"got {array.dtype} of shape {list(array.shape)}"
        )
    return array.astype(np.int64)


def check_positions(
    positions: Int[np.ndarray, " T"], counts: Int[np.ndarray, " S"], lengths: Int[np.ndarray, " S"]
) -> None:
    total = int(counts.sum())
    if len(positions) != total:
        raise InputError(f"positions must be {total}, one per route; got {len(positions)}")
    sequence = np.repeat(np.arange(len(counts)), counts)
    falls = (np.diff(positions) <= 0) & (np.diff(sequence) == 0)
    if falls.any() or (positions >= lengths[sequence]).any():
        raise InputError(
            "positions must rise within each sequence and lie below its length; "
            f"got positions={positions.tolist()!s:.60}"
        )


def check_whole_routes(
    experts: Int[np.ndarray, "S W L K"], tokens: Bool[np.ndarray, "S W"], fingerprint: Fingerprint
) -> None:
    none = experts == NO_ROUTE
    part = tokens & none.any(axis=(2, 3)) & ~none.all(axis=(2, 3))
    if part.any():
        sequence, column = (int(i) for i in np.argwhere(part)[0])
        token = int(tokens[sequence, :column].sum())
        layer = int(none[sequence, column].any(axis=1).argmax())
        raise InputError(
            "the experts of a token in all layers must all be -1, or none of them; "
            f"got {experts[sequence, column, layer].tolist()} of sequence {sequence}, "
            f"token {token}, layer {fingerprint.layers[layer]}"
        )


def check_experts(experts: Int[np.ndarray, "T L K"], fingerprint: Fingerprint) -> None:
    outside = (experts < 0) | (experts >= fingerprint.num_experts)
    if outside.any():
        token, layer, _ = (int(i) for i in np.argwhere(outside)[0])
        raise InputError(
            f"experts must be between 0 and {fingerprint.num_experts - 1}; "
            f"got {experts[token, layer].tolist()} of token {token}, "
            f"layer {fingerprint.layers[layer]}"
        )
    ordered = np.sort(experts, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if twice.any():
        token, layer = (int(i) for i in np.argwhere(twice)[0])
        raise InputError(
            f"a token must choose different experts; got {experts[token, layer].tolist()} "
            f"of token {token}, layer {fingerprint.layers[layer]}"
        )


_FORMAT = "l2r-routes-1"


def write_arrays(
    path: Path,
    arrays: Mapping[str, np.ndarray | None],
    fingerprint: str,
    rows: Iterable[Int[Tensor, " S"]] | None = None,
) -> None:
    """Write a file whole or not at all; arrays that are None are left out.

    rows: token ids of each sequence, of which the file gets a digest.
    """
    there = {name: np.ascontiguousarray(a) for name, a in arrays.items() if a is not None}
    metadata = {"format": _FORMAT, "fingerprint": fingerprint}
    if rows is not None:
        metadata["tokens"] = _digest(rows)
    write_bytes(path, to_bytes(there, metadata))


def check_tokens(path: Path, rows: Iterable[Int[Tensor, " S"]]) -> bool:
    """Say whether a file of routes has a digest of its tokens, which is then that of these rows.

    Raises ValueError where it is of other token ids.
    """
    with safe_open(path, framework="np") as file:
        recorded = (file.metadata() or {}).get("tokens")
    if recorded is not None and recorded != (digest := _digest(rows)):
        raise InputError(
            f"routes are of other tokens: {path} has the digest {recorded:.16}, the text that is "
            f"read {digest:.16}; use the same text, tokenizer, instances and length"
        )
    return recorded is not None


def _digest(rows: Iterable[Int[Tensor, " S"]]) -> str:
    """sha256 of the token ids of all rows in order, as little-endian int64."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def read_arrays(
    path: Path, needed: tuple[str, ...], optional: tuple[str, ...]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays by name, and the fingerprint's fields. Raises ValueError or OSError."""
    refuse_endless(path)
    try:
        with safe_open(path, framework="np") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            if metadata.get("format") != _FORMAT:
                raise InputError(f"format must be {_FORMAT!r}; got {metadata.get('format')!r:.40}")
            if not names.issuperset(needed):
                raise InputError(f"arrays must be {', '.join(needed)}; got {sorted(names)!s:.80}")
            arrays = {n: file.get_tensor(n) for n in (*needed, *optional) if n in names}
    except SafetensorError as error:
        raise InputError(f"it is no whole safetensors file ({error})") from error
    return arrays, parse_json(metadata.get("fingerprint", "").encode())
