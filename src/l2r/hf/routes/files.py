"""Arrays of routes in a safetensors file."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes
from torch import Tensor

from l2r.errors import InputError
from l2r.runs.atomic import write_bytes
from l2r.runs.reading import parse_json, refuse_endless

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
    """Whether a file of routes has a digest of its tokens, which is then that of these rows.

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
