"""Tensors of a safetensors file as bytes: listed, copied and compared, whatever their dtype.

The library gives tensors, and torch has not every dtype of the format. A copy needs no dtype: a
file is eight bytes with the length of a header, the header in JSON, and the tensors one after
another (huggingface.co/docs/safetensors).
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from l2r.errors import InputError

_PIECE = 1 << 24  # bytes in memory at a time
_ALIGNED = 8  # where the first tensor begins, so that all may be mapped
_NAMES = {  # in headers, of the dtypes of pickled tensors
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
_FLOATS = {_NAMES[d]: d for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


class Stored(NamedTuple):
    """Tensor in a file: ``size`` bytes from ``start``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def stored_tensors(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors by name in the order of a file, and its metadata. Raises ValueError for damage."""
    try:
        with safe_open(file, "pt"):  # checks the header and the length of the file
            pass
    except SafetensorError as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    metadata = header.pop("__metadata__", None) or {}
    found = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        place = (8 + length + start, end - start)
        found[name] = Stored(file, entry["dtype"], tuple(entry["shape"]), *place)
    return found, metadata


def write_tensors(
    file: Path, tensors: Mapping[str, Stored | Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors of files, and new ones in memory, into a safetensors file.

    Those with the largest numbers come first, as safetensors orders them: each begins at a
    multiple of its width. Raises ValueError for a tensor of a dtype that has no name in the format.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    order = sorted(tensors, key=lambda name: -_width(tensors[name]))
    start = 0
    for name in order:
        dtype, shape, size = described(tensors[name])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for piece in pieces(tensors[name]):
                stream.write(piece)


def described(tensor: Stored | Tensor) -> tuple[str, tuple[int, ...], int]:
    """Name of the dtype, shape, and number of bytes."""
    if isinstance(tensor, Stored):
        return tensor.dtype, tensor.shape, tensor.size
    if tensor.dtype not in _NAMES:
        raise InputError(f"tensors must be of {', '.join(_NAMES.values())}; got {tensor.dtype}")
    return _NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes


def pieces(tensor: Stored | Tensor) -> Iterator[memoryview | bytes]:
    """Return the bytes of a tensor, some megabytes at a time."""
    if isinstance(tensor, Tensor):
        numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield from (numbers[i : i + _PIECE].data for i in range(0, len(numbers), _PIECE))
        return
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        left = tensor.size
        while left:
            piece = stream.read(min(left, _PIECE))
            if not piece:
                raise InputError(f"{tensor.file} has become shorter while it was read")
            left -= len(piece)
            yield piece


def compare(old: Stored | Tensor, new: Stored | Tensor) -> str:
    """Name what is wrong with a copy: "changed", "not finite", or nothing.

    A copy has the dtype, the shape and the bytes; codes of quantizers are finite.
    """
    if described(old) != described(new):
        return "changed"
    dtype, finite = _FLOATS.get(described(old)[0]), True
    for a, b in zip(pieces(old), pieces(new), strict=True):
        if a != b:
            return "changed"
        finite = finite and (dtype is None or _is_finite(a, dtype))
    return "" if finite else "not finite"


def _is_finite(piece: memoryview | bytes, dtype: torch.dtype) -> bool:
    values = torch.frombuffer(bytearray(piece), dtype=dtype)
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


def _width(tensor: Stored | Tensor) -> int:
    if isinstance(tensor, Tensor):
        return tensor.itemsize
    numbers = prod(tensor.shape)
    return tensor.size // numbers if numbers else 1
