"""A record of arrays as one .npz file, written whole or not at all."""

import io
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np

from l2r.runs.atomic import write_bytes

Record = TypeVar("Record")


def save_arrays(path: Path, record: Any) -> None:
    """Write every field of a dataclass of arrays under its name."""
    stream = io.BytesIO()
    np.savez_compressed(stream, **{f.name: getattr(record, f.name) for f in fields(record)})
    write_bytes(path, stream.getvalue())


def read_arrays(path: Path, kind: type[Record], what: str) -> Record:
    """Read such a file. Raises ValueError, which says ``what`` it should hold, if it does not."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            arrays = dict(data)
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"cannot read {what} from {path}: {error}") from error
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if names - set(arrays):
        missing = ", ".join(sorted(names - set(arrays)))
        raise ValueError(f"{path} holds no {what}: {missing} missing")
    return kind(**{name: arrays[name] for name in names})
