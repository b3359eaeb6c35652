"""Calls of a model: which tokens they read, and the rows of routes that their routers take.

Shape letters: B rows of a batch, W its columns, T = B * W inputs of a router, S sequences, N
experts, K experts chosen per token, R rows of the routes.
"""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.hf.routes.layers import check_weighable
from l2r.hf.routes.routes import NO_ROUTE, Routes
from l2r.hf.swap.sites import Site
from l2r.routers import Router
from l2r.routers.observe import routed, unwrapped_model

PADDING = -1  # number of the sequence of an input that is no token


class CallInputs(NamedTuple):
    """Shape of a call. columns: None where the inputs are images. mask [B, W]: where there are
    tokens, those of the cache first, None for all. packed: lengths of the sequences, where
    ``position_ids`` tell several in a row. past: tokens in the cache. grows: later calls may
    continue the sequences.
    """

    rows: int
    columns: int | None
    mask: Bool[np.ndarray, "B W"] | None
    packed: Int[np.ndarray, " S"] | None
    past: int
    grows: bool


class TokenPlaces(NamedTuple):
    """sequence [T] and token [T] that each input of a router is; PADDING for no token."""

    sequence: Int[np.ndarray, " T"]
    token: Int[np.ndarray, " T"]

    @property
    def inputs(self) -> int:
        """Number of inputs, T."""
        return len(self.token)


class EvenPlaces:
    """``TokenPlaces`` of rows without padding, counted where they are read.

    Every step of a generation has them, and nobody reads those of a recording before its end.
    """

    def __init__(self, first: int, before: Int[np.ndarray, " B"], columns: int) -> None:
        self._first, self._before, self._columns = first, before, columns
        self.inputs = len(before) * columns

    @property
    def sequence(self) -> Int[np.ndarray, " T"]:
        """Sequence of each input."""
        return np.repeat(np.arange(self._first, self._first + len(self._before)), self._columns)

    @property
    def token(self) -> Int[np.ndarray, " T"]:
        """Token that each input is of its sequence."""
        return (self._before[:, None] + np.arange(self._columns)).reshape(-1)


Places = TokenPlaces | EvenPlaces


def read_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallInputs:
    """Shape of a call from its arguments.

    Raises ValueError for a call without tensors and for a mask that is not [rows, columns].
    """
    values = _named(model, args, kwargs)
    first = _first_tensor(values)
    rows, columns = _shape(first)
    # Known by what it does: transformers renames it, and continuous batching has another kind.
    cache = next((value for value in values.values() if hasattr(value, "get_seq_length")), None)
    past = 0 if cache is None else int(cache.get_seq_length())
    mask = values.get("attention_mask")
    if cache is not None and columns is not None:
        mask = _own_columns(mask, past, rows, columns)
    if mask is not None and getattr(mask, "ndim", 0) != 2:
        raise InputError(
            "attention_mask must be [rows, columns] so that routes find their tokens; got "
            f"{list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
        )
    tokens = None if mask is None or columns is None else (mask.detach() != 0).cpu().numpy()
    if tokens is not None and tokens.all():
        tokens = None
    grows = cache is not None or values.get("use_cache") is True
    positions: Any = values.get("position_ids")
    packed = None
    if tokens is None and not grows and getattr(positions, "ndim", 0) == 2:
        starts = (positions.detach() == 0).cpu().expand(rows, -1).numpy().copy()
        starts[:, 0] = True
        if starts[:, 1:].any():
            packed = np.diff(np.flatnonzero(starts), append=starts.size)
    return CallInputs(rows, columns, tokens, packed, past, grows)


class Calls:
    """Follow the calls of one model: new sequences, or those of the last call continued."""

    def __init__(self) -> None:
        self.sequences = 0  # that calls have begun
        self._first = 0  # sequence of the last call's first row
        self._rows = 0
        self._columns = 0  # that the last call's rows have in the cache
        self._tokens = np.zeros(0, np.int64)  # the same without padding, by row

    def continues(self, inputs: CallInputs) -> bool:
        """Say whether a call goes on with the last one's sequences.

        Raises ValueError for a cache that no call before has filled.
        """
        if not inputs.past:
            return False
        if not self._rows or self._rows != inputs.rows:
            raise InputError(
                f"a call goes on with a cache of {inputs.past} tokens of {inputs.rows} rows that "
                f"the call before it did not fill, which had {self._rows} rows; start and end "
                "one generation inside the block"
            )
        return True

    def go_on(self, inputs: CallInputs) -> Places:
        """Places of a call that continues."""
        columns = inputs.columns or 0
        past = inputs.past
        before = self._tokens
        if self._columns != past:
            before = before - (self._columns - past)
        new = None
        if inputs.mask is not None:
            if inputs.mask.shape[1] not in (columns, past + columns):
                raise InputError(
                    f"attention_mask must have {past + columns} columns, {past} of the cache and "
                    f"{columns} new; got {inputs.mask.shape[1]}"
                )
            new = inputs.mask[:, -columns:]
            if inputs.mask.shape[1] > columns:
                before = inputs.mask[:, :-columns].sum(axis=1)
        self._remember(inputs, past + columns, before + _counts(new, columns))
        if new is None:
            return EvenPlaces(self._first, before, columns)
        return _places(new, self._first, before)

    def begin(self, inputs: CallInputs, columns: int) -> Places:
        """Places of a call with a new sequence in every row.

        Raises ValueError for a mask of another shape.
        """
        tokens, before = inputs.mask, np.zeros(inputs.rows, np.int64)
        if tokens is not None and tokens.shape != (inputs.rows, columns):
            raise InputError(
                f"attention_mask must be [{inputs.rows}, {columns}], as the inputs are; "
                f"got {list(tokens.shape)}"
            )
        self._first = self.sequences
        self.sequences += inputs.rows
        self._remember(inputs, columns, before + _counts(tokens, columns))
        if tokens is None:
            return EvenPlaces(self._first, before, columns)
        return _places(tokens, self._first, before)

    def begin_packed(self, lengths: Int[np.ndarray, " S"]) -> TokenPlaces:
        """Places of a call with new sequences one after another, which no call continues."""
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        first = np.cumsum(lengths) - lengths
        places = TokenPlaces(self.sequences + sequence, np.arange(len(sequence)) - first[sequence])
        self.sequences += len(lengths)
        self._rows = 0
        return places

    def _remember(self, inputs: CallInputs, columns: int, tokens: Int[np.ndarray, " B"]) -> None:
        self._rows, self._columns, self._tokens = inputs.rows, columns, tokens


def _counts(tokens: Bool[np.ndarray, "B W"] | None, columns: int) -> Int[np.ndarray, " B"] | int:
    return columns if tokens is None else tokens.sum(axis=1)


def _places(
    tokens: Bool[np.ndarray, "B W"], first: int, before: Int[np.ndarray, " B"]
) -> TokenPlaces:
    sequence = np.where(tokens, first + np.arange(len(tokens))[:, None], PADDING)
    token = np.where(tokens, before[:, None] + np.cumsum(tokens, axis=1) - 1, PADDING)
    return TokenPlaces(sequence.flatten(), token.flatten())


def _own_columns(mask: Any, past: int, rows: int, columns: int) -> Any:
    """Find new columns that are tokens [B, W], by generation's mask for a static cache.

    That is [B, 1, W, length of the cache], one for each kind of layer in some families: a token
    sees itself, and padding is seen by none. Another mask is returned as it is.
    """
    kinds = list(mask.values()) if isinstance(mask, Mapping) else [mask]
    for part in kinds:
        if isinstance(part, Tensor) and part.ndim == 4 and part.shape[3] >= past + columns:
            seen = part if part.dtype == torch.bool else part == 0  # else what is added to scores
            own = seen[:, 0, :, past : past + columns].diagonal(dim1=1, dim2=2)
            return own.expand(rows, -1)
    return mask


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = _parameter_names(unwrapped_model(model).forward) if args else ()
    return {**dict(zip(names, args, strict=False)), **kwargs}


# By function: to read them takes longer than all else that a decoded token costs here.
_KNOWN_NAMES: WeakKeyDictionary[Callable[..., Any], tuple[str, ...]] = WeakKeyDictionary()


def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    function = getattr(forward, "__func__", None)  # of the class, where no instance has its own
    names = None if function is None else _KNOWN_NAMES.get(function)
    if names is None:
        names = tuple(inspect.signature(forward).parameters)
        if function is not None:
            _KNOWN_NAMES[function] = names
    return names


def _first_tensor(values: Mapping[str, Any]) -> Tensor:
    names = [name for name in ("input_ids", "inputs_embeds", "pixel_values") if name in values]
    for name in (*names, *values):
        if isinstance(values[name], Tensor):
            tensor: Tensor = values[name]
            return tensor
    raise InputError(f"a call must have a tensor to be replayed; got {', '.join(values) or 'none'}")


def _shape(tensor: Tensor) -> tuple[int, int | None]:
    """Rows and columns of token ids [B, W], hidden states [B, W, D] or [T, D], or images."""
    if tensor.ndim == 4:
        return tensor.shape[0], None
    if tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point()):
        return tensor.shape[0], tensor.shape[1]
    return 1, tensor.shape[0]


class RouteReader:
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

    def rows(self, inputs: CallInputs) -> Int[np.ndarray, " T"]:
        """Row of the routes of each input of a call, the one after the last where it has none.

        Raises ValueError where the call does not fit the sequences.
        """
        self._next = copy(self._calls)
        if self._next.continues(inputs):
            return self._rows_of(self._next.go_on(inputs))
        return self._rows_of(self._new_places(inputs))

    def keep(self) -> None:
        """Count the sequences of the last call, which has succeeded, as read."""
        self._calls = self._next

    def _new_places(self, inputs: CallInputs) -> Places:
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
            return np.full(places.inputs, none)
        lengths = self._routes.lengths
        sequence, token = places.sequence, places.token
        inside = (token >= 0) & (token < lengths[sequence])
        start = np.cumsum(lengths) - lengths
        at = np.where(inside, start[sequence] + token, len(self._table) - 1)
        return self._table[at]


def _row_table(routes: Routes) -> Int[np.ndarray, " tokens"]:
    """Row of every token of every sequence, and one more, of no token."""
    none = len(routes.experts)
    table = np.full(int(routes.lengths.sum()) + 1, none)
    start = np.cumsum(routes.lengths) - routes.lengths
    table[start[routes.sequence_of_rows] + routes.positions] = np.arange(none)
    return table


def _one_a_row(inputs: CallInputs, left: Int[np.ndarray, " S"]) -> bool:
    rows, columns = inputs.rows, inputs.columns
    return columns is None or (len(left) >= rows and bool((left[:rows] == columns).all()))


def _check_filled(lengths: Int[np.ndarray, " S"], inputs: CallInputs, first: int) -> None:
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


def with_no_route_row(values: np.ndarray) -> Tensor:
    """Append a row of NO_ROUTE to a tensor."""
    none = np.full((1, *values.shape[1:]), NO_ROUTE, values.dtype)
    return torch.from_numpy(np.concatenate([values, none]))


class RouteRows(NamedTuple):
    """Row of the routes of each input of a call; complete: every input has a route."""

    of: Int[Tensor, " T"]
    complete: bool


ReadRows = Callable[[int], RouteRows | None]  # of a call with so many inputs; None: not replayed


def gathers(site: Site) -> bool:
    """Say whether a router weighs given experts in the call that makes the logits."""
    router = site.router
    ours = isinstance(router, Router) and type(router).forward is Router.forward
    return ours and site.selection.fused


def gathering(site: Site, experts: Tensor, recorded: None, read_rows: ReadRows) -> Any:
    """Make a forward for which ``gathers`` holds; tokens without a route choose in its call."""
    del recorded
    forward = site.router.forward

    def gather(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["x"]
        rows = read_rows(x.shape[:-1].numel())
        if rows is None:
            return forward(*args, **kwargs)
        chosen = experts.to(x.device).index_select(0, rows.of.to(x.device)).to(torch.int64)
        given = kwargs.pop("routes", None)  # of a block that was opened later
        if given is not None:
            chosen = torch.where(given[:, :1] == NO_ROUTE, chosen, given)
        return forward(*args, **kwargs, routes=chosen)

    return gather


def taking(site: Site, experts: Tensor, recorded: Tensor | None, read_rows: ReadRows) -> Any:
    """Return the forward of any router, which chooses first; what it chose is replaced.

    ``recorded`` [R, K] are weights to take too.
    """
    router, forward, selection = site.router, site.router.forward, check_weighable(site)

    def take(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        logits, own_weights, own = routed(router, output)
        rows = read_rows(own.shape[0])
        if rows is None:
            return output
        at = rows.of.to(own.device)
        chosen = experts.to(own.device).index_select(0, at).to(own.dtype)
        unrouted = None if rows.complete else chosen[:, :1] == NO_ROUTE
        if unrouted is not None:
            chosen = torch.where(unrouted, own, chosen)
        if recorded is not None:
            weighed = recorded.to(own.device).index_select(0, at).to(own_weights.dtype)
            if unrouted is not None:
                weighed = torch.where(unrouted, own_weights, weighed)
        elif _known_equal(chosen, own):
            return output
        else:
            # Weights of the router itself where it chose the same: equal to the bit.
            same = (chosen == own).all(dim=1, keepdim=True)
            live = selection.weigh(router, logits, chosen).to(own_weights.dtype)
            weighed = torch.where(same, own_weights, live)
        values = (logits, weighed, chosen)
        return type(output)(*values) if hasattr(output, "_fields") else values

    return take


def _known_equal(chosen: Tensor, own: Tensor) -> bool:
    """Say whether both are equal if that is cheap to know: no graph break, no device read.

    Most steps of one token are; the rest of a replay takes longer than the comparison.
    """
    return not torch.compiler.is_compiling() and chosen.is_cpu and torch.equal(chosen, own)
