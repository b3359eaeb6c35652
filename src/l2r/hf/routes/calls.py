"""Which tokens of which sequences a call of a model reads: padded, packed, step by step.

Shape letters: B rows of a batch, W its columns, T = B * W inputs of a router, S sequences.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.hf.routes.layers import unwrapped_model

PADDING = -1  # number of the sequence of an input that is no token


class Inputs(NamedTuple):
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


class Places(NamedTuple):
    """sequence [T] and token [T] that each input of a router is; PADDING for no token."""

    sequence: Int[np.ndarray, " T"]
    token: Int[np.ndarray, " T"]


def read_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inputs:
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
    return Inputs(rows, columns, tokens, packed, past, grows)


class Calls:
    """Follow the calls of one model: new sequences, or those of the last call continued."""

    def __init__(self) -> None:
        self.sequences = 0  # that calls have begun
        self._first = 0  # sequence of the last call's first row
        self._rows = 0
        self._columns = 0  # that the last call's rows have in the cache
        self._tokens = np.zeros(0, np.int64)  # the same without padding, by row

    def continues(self, inputs: Inputs) -> bool:
        """Whether a call goes on with the last one's sequences.

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

    def go_on(self, inputs: Inputs) -> Places:
        """Places of a call that continues."""
        columns = inputs.columns or 0
        past = inputs.past
        before = self._tokens - (self._columns - past)
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
            return _all_places(self._first, before, columns)
        return _places(new, self._first, before)

    def begin(self, inputs: Inputs, columns: int) -> Places:
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
            return _all_places(self._first, before, columns)
        return _places(tokens, self._first, before)

    def begin_packed(self, lengths: Int[np.ndarray, " S"]) -> Places:
        """Places of a call with new sequences one after another, which no call continues."""
        sequence = np.repeat(np.arange(len(lengths)), lengths)
        first = np.cumsum(lengths) - lengths
        places = Places(self.sequences + sequence, np.arange(len(sequence)) - first[sequence])
        self.sequences += len(lengths)
        self._rows = 0
        return places

    def _remember(self, inputs: Inputs, columns: int, tokens: Int[np.ndarray, " B"]) -> None:
        self._rows, self._columns, self._tokens = inputs.rows, columns, tokens


def _counts(tokens: Bool[np.ndarray, "B W"] | None, columns: int) -> Int[np.ndarray, " B"] | int:
    return columns if tokens is None else tokens.sum(axis=1)


def _all_places(first: int, before: Int[np.ndarray, " B"], columns: int) -> Places:
    """``_places`` without padding, which is every step of a generation: a third of the time."""
    sequence = np.repeat(np.arange(first, first + len(before)), columns)
    return Places(sequence, (before[:, None] + np.arange(columns)).reshape(-1))


def _places(tokens: Bool[np.ndarray, "B W"], first: int, before: Int[np.ndarray, " B"]) -> Places:
    sequence = np.where(tokens, first + np.arange(len(tokens))[:, None], PADDING)
    token = np.where(tokens, before[:, None] + np.cumsum(tokens, axis=1) - 1, PADDING)
    return Places(sequence.flatten(), token.flatten())


def _own_columns(mask: Any, past: int, rows: int, columns: int) -> Any:
    """Which new columns are tokens [B, W], by a mask as generation makes it for a static cache.

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
