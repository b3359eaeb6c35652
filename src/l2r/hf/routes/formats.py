"""Routes in the formats of vLLM, SGLang, verl and Megatron-core.

vLLM and SGLang give an array [tokens - 1, hidden layers, k] per sequence: the token sampled last
was never forwarded, and layers without a router have rows too, of zeros. verl puts these arrays
into its padded batch, with zeros where there is none. Megatron-core's
RouterReplay holds [width * sequences, k] per routed layer, the sequences innermost.

Shape letters: S sequences, W width of the padded batch, L layers with a router, K experts chosen.
"""

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from l2r.errors import InputError
from l2r.files.arrays import parse_npy
from l2r.hf.routes.fingerprint import Fingerprint
from l2r.hf.routes.routes import NO_ROUTE, Routes, Side

_TOKEN_COUNTS = ("prompt_tokens", "completion_tokens")


def from_vllm(
    sequences: Iterable[str | bytes | np.ndarray],
    fingerprint: Fingerprint,
    *,
    prompt_start: int | Sequence[int] = 0,
) -> Routes:
    """Read ``routed_experts`` of vLLM's answers, one per sequence.

    Each is base64 text, the bytes of a ``.npy`` file, or the array of ``CompletionOutput``.
    ``prompt_start``: what was asked for as ``routed_experts_prompt_start``, for all or for each;
    the tokens before it have no route, and neither has the last.
    Raises ValueError for what is no such array and for sizes other than the fingerprint's.
    """
    return _from_engine([_npy(value) for value in sequences], fingerprint, prompt_start)


def to_vllm(routes: Routes) -> list[str]:
    """Write ``routed_experts`` of every sequence as vLLM does, base64 of a ``.npy`` file.

    The last token's route is left out. Raises ValueError where one in the middle has none, for a
    sequence without tokens and where the fingerprint lacks ``hidden_layers``.
    """
    return [vllm_text(array) for array in _to_engine(routes, routes.experts.dtype)]


def vllm_text(experts: Int[np.ndarray, "T H K"]) -> str:
    """``routed_experts`` of a sequence: base64 of a ``.npy`` file, all H hidden layers counted."""
    stream = io.BytesIO()
    np.save(stream, experts, allow_pickle=False)
    return base64.b64encode(stream.getvalue()).decode()


def from_sglang(
    sequences: Iterable[str | bytes | dict[str, Any]],
    fingerprint: Fingerprint,
    *,
    start_len: int | Sequence[int] = 0,
) -> Routes:
    """Read ``routed_experts`` of SGLang's answers, one per sequence.

    Each is an answer with its ``meta_info``, or the base64 text in it: int32 numbers without a
    shape. ``start_len``: ``routed_experts_start_len`` of the request, as in ``from_vllm``.
    Raises ValueError for anything else, for sizes other than the fingerprint's, and for an answer
    with another number of routes than its counts of tokens say.
    """
    shape = (-1, _hidden_layers(fingerprint), fingerprint.top_k)
    arrays, lengths = [], list[int | None]()
    for value in sequences:
        text: Any = value
        lengths.append(None)
        if isinstance(value, dict):
            meta = value["meta_info"]
            text, counts = meta["routed_experts"], [meta.get(name) for name in _TOKEN_COUNTS]
            lengths[-1] = None if None in counts else sum(counts)
        try:
            numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
            arrays.append(numbers.reshape(shape))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"routed_experts of SGLang must be base64 of int32 numbers [tokens, "
                f"{shape[1]}, {shape[2]}]: {error}"
            ) from error
    return _from_engine(arrays, fingerprint, start_len, lengths)


def to_sglang(routes: Routes) -> list[str]:
    """Write every sequence as SGLang does; see ``to_vllm``."""
    arrays = _to_engine(routes, np.dtype("<i4"))
    return [base64.b64encode(array.tobytes()).decode() for array in arrays]


def from_verl(
    experts: Int[Tensor, "S W H K"], mask: Bool[Tensor, "S W"], fingerprint: Fingerprint
) -> Routes:
    """Read ``batch["routed_experts"]`` of verl, with its ``attention_mask``.

    Prompts are padded to the left, answers to the right. Tokens after the last one that was
    forwarded have zeros, and no route here; with one expert per token, whose route may be 0, that
    is the last token alone. Raises ValueError for other sizes and where the server recorded
    nothing.
    """
    tokens = mask.bool().cpu().numpy()
    if experts.dim() != 4 or tuple(experts.shape[:2]) != tokens.shape:
        raise InputError(
            "routed_experts must be [sequences, width, hidden layers, k] and mask [sequences, "
            f"width]; got {list(experts.shape)} and {list(tokens.shape)}"
        )
    arrays = []
    for rows, has in zip(experts.cpu().numpy(), tokens, strict=True):
        own = rows[has]
        known = np.flatnonzero(own.any(axis=(1, 2)))
        end = len(own) - 1 if fingerprint.top_k == 1 else int(known[-1]) + 1 if len(known) else 0
        arrays.append(own[: max(0, end)])
    routes = _from_engine(arrays, fingerprint, 0)
    return replace(routes, lengths=tokens.sum(axis=1))


def from_megatron(
    layers: Sequence[Tensor], mask: Bool[Tensor, "S W"], fingerprint: Fingerprint
) -> Routes:
    """Read ``RouterReplay.get_recorded_data()`` of a batch: int64 [W * S, K] for each layer.

    ``mask`` is True where the batch has a token.
    Raises ValueError for another number of layers or tokens.
    """
    length, width = len(fingerprint.layers), mask.shape[1]
    shapes = sorted({tuple(layer.shape) for layer in layers})
    if len(layers) != length or shapes != [(mask.numel(), fingerprint.top_k)]:
        raise InputError(
            f"recorded data must be {length} tensors [{mask.numel()}, {fingerprint.top_k}]; "
            f"got {len(layers)} of shapes {shapes}"
        )
    together = torch.stack([layer.detach().cpu().long() for layer in layers], dim=1)
    grid = together.view(width, -1, length, fingerprint.top_k).transpose(0, 1)
    return Routes.from_padded(grid, mask.cpu(), fingerprint)


def to_megatron(
    routes: Routes, *, side: Side = "right", width: int | None = None
) -> list[Int[Tensor, "WS K"]]:
    """Write a padded batch for ``RouterReplay.set_replay_data``, int64, one tensor per layer.

    Megatron-core replays every place. Padding, and a last token without a route, get experts in
    turn, so that none has over one more of them than another. Raises ValueError where another
    token has no route, since Megatron-core has no way to let it choose.
    """
    f = routes.fingerprint
    if (
        routes.positions != np.arange(len(routes.experts)) - routes.ends[:-1].repeat(routes.counts)
    ).any() or (routes.lengths - routes.counts > 1).any():
        raise InputError(
            "Megatron-core replays every token, so each must have a route but the last of a "
            "sequence; these routes lack some"
        )
    experts, _ = routes.padded(side, width)
    grid = experts.transpose(0, 1).flatten(0, 1)
    empty = (grid[:, 0, 0] == NO_ROUTE).nonzero()[:, 0]
    turn = torch.arange(len(empty) * f.top_k).view(-1, 1, f.top_k) % f.num_experts
    grid[empty] = turn.to(grid.dtype).expand(-1, grid.shape[1], -1)
    return list(grid.unbind(1))


def _from_engine(
    arrays: Sequence[np.ndarray],
    fingerprint: Fingerprint,
    start: int | Sequence[int],
    lengths: Sequence[int | None] = (),
) -> Routes:
    """Routes of arrays, one per sequence; ``lengths`` in tokens are those that an engine gave."""
    hidden = _hidden_layers(fingerprint)
    starts = [start] * len(arrays) if isinstance(start, int) else list(start)
    if len(starts) != len(arrays) or min(starts, default=0) < 0:
        raise InputError(
            f"starts must be >= 0, one for each of the {len(arrays)} sequences; got {starts}"
        )
    for array in arrays:
        if array.ndim != 3 or array.shape[1:] != (hidden, fingerprint.top_k):
            raise InputError(
                f"routed_experts must be [tokens, {hidden}, {fingerprint.top_k}], all hidden "
                f"layers counted; got {list(array.shape)}"
            )
        if array.dtype.kind not in "iu":
            raise InputError(f"routed_experts must be whole numbers; got {array.dtype}")
    for number, (length, begin) in enumerate(zip(lengths, starts, strict=False)):
        found = len(arrays[number])
        if length is not None and found != length - 1 - begin:
            raise InputError(
                f"sequence {number} has {length} tokens, and {found} routes from token {begin} on, "
                f"where {length - 1 - begin} are due; the server may have ignored start_len"
            )
    for number, array in enumerate(arrays):
        _check_recorded(number, array[:, list(fingerprint.layers)])
    empty = np.zeros((0, hidden, fingerprint.top_k), np.uint8)
    experts = np.concatenate([empty, *map(_signed, arrays)])[:, list(fingerprint.layers)]
    counts = np.array([len(array) for array in arrays], np.int64)
    first = np.array(starts, np.int64)
    places = [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
    positions = np.concatenate([np.arange(0), *places])
    return Routes(experts, fingerprint, first + counts + 1, counts, positions)


def _check_recorded(number: int, experts: Int[np.ndarray, "T L K"]) -> None:
    """Raise ValueError where a server gave zeros, with which its arrays begin, and no experts.

    With one expert per token, 0 may be a choice: of 2 experts, 16 choices are all the first by
    chance once in 65,536 times.
    """
    zero = (experts == 0).all(axis=(1, 2))
    if experts.shape[2] > 1 and zero.any():
        raise InputError(
            f"the server recorded nothing for token {int(zero.argmax())} of sequence {number}, "
            f"and for {int(zero.sum())} of its {len(experts)} in all: their experts are all 0"
        )
    if zero.all() and experts.size >= 16:
        raise InputError(
            f"the server recorded nothing for sequence {number}: expert 0 in every layer of all "
            f"its {len(experts)} tokens"
        )


def _signed(array: np.ndarray) -> np.ndarray:
    """int64 for uint64, of which numpy makes floats when it meets another."""
    return array.astype(np.int64) if array.dtype == np.uint64 else array


def _to_engine(routes: Routes, kind: np.dtype[Any]) -> list[np.ndarray]:
    f = routes.fingerprint
    _hidden_layers(f)
    arrays = []
    for number, (begin, end, length) in enumerate(
        zip(routes.ends[:-1], routes.ends[1:], routes.lengths, strict=True)
    ):
        if length == 0:
            raise InputError(
                f"a sequence must have at least 1 token to be written; sequence {number} has 0"
            )
        positions = routes.positions[begin:end]
        before = positions < length - 1
        start = int(positions[0]) if len(positions) else 0
        if before.sum() != length - 1 - start:
            raise InputError(
                f"every token but the last must have a route, from some token on; sequence "
                f"{number} has {before.sum()} routes for tokens {start} to {length - 2}"
            )
        arrays.append(all_layers(routes.experts[begin:end][before].astype(kind), f))
    return arrays


def all_layers(
    experts: Int[np.ndarray, "T L K"], fingerprint: Fingerprint
) -> Int[np.ndarray, "T H K"]:
    """Return the same with zeros for hidden layers without a router.

    Raises ValueError where the fingerprint lacks ``hidden_layers``.
    """
    hidden = _hidden_layers(fingerprint)
    array = np.zeros((len(experts), hidden, fingerprint.top_k), experts.dtype)
    array[:, list(fingerprint.layers)] = experts
    return array


def _npy(value: str | bytes | np.ndarray) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    try:
        content = base64.b64decode(value, validate=True) if isinstance(value, str) else value
        return parse_npy(content)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"routed_experts of vLLM must be base64 of a .npy file: {error}"
        ) from error


def _hidden_layers(fingerprint: Fingerprint) -> int:
    if fingerprint.hidden_layers is None:
        raise InputError("the fingerprint must have hidden_layers; engines count them all")
    return fingerprint.hidden_layers
