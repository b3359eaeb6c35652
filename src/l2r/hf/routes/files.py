"""Arrays of routes in a safetensors file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from l2r.runs.atomic import write_bytes
from l2r.runs.reading import parse_json

_FORMAT = "l2r-routes-1"


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray | None], fingerprint: str) -> None:
    """Write a file whole or not at all; arrays that are None are left out."""
    there = {name: np.ascontiguousarray(a) for name, a in arrays.items() if a is not None}
    write_bytes(path, to_bytes(there, {"format": _FORMAT, "fingerprint": fingerprint}))


def read_arrays(
    path: Path, needed: tuple[str, ...], optional: tuple[str, ...]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays by name, and the fingerprint's fields. Raises ValueError or OSError."""
    try:
        with safe_open(path, framework="np") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"format must be {_FORMAT!r}; got {metadata.get('format')!r:.40}")
            if not names.issuperset(needed):
                raise ValueError(f"arrays must be {', '.join(needed)}; got {sorted(names)!s:.80}")
            arrays = {n: file.get_tensor(n) for n in (*needed, *optional) if n in names}
    except SafetensorError as error:
        raise ValueError(f"it is no whole safetensors file ({error})") from error
    return arrays, parse_json(metadata.get("fingerprint", "").encode())
