"""A record of arrays as one .npz file, written whole or not at all."""

import io
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self
from zipfile import BadZipFile, ZipFile

import numpy as np
from jaxtyping import jaxtyped

from l2r.runs.atomic import write_bytes

_MAX_BYTES = 1 << 30  # unpacked: a page holds them all in memory, some of them twice


class Arrays:
    """Base of a dataclass of arrays, each in the file under its name; ``what`` it is, in words."""

    what: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        stream = io.BytesIO()
        np.savez_compressed(stream, **{f.name: getattr(self, f.name) for f in fields(self)})
        write_bytes(path, stream.getvalue())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read such a file. Raises ValueError when it is missing or another."""
        try:
            with path.open("rb") as file, ZipFile(file) as archive:
                unpacked = sum(part.file_size for part in archive.infolist())
            if unpacked > _MAX_BYTES:
                raise ValueError(f"its arrays must take at most {_MAX_BYTES:,} bytes")
            with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
                arrays = dict(data)
        except (OSError, ValueError, EOFError, BadZipFile, MemoryError, zlib.error) as error:
            raise ValueError(f"cannot read {cls.what} from {path}: {error}") from error
        names = {field.name for field in fields(cls)}
        if names - set(arrays):
            missing = ", ".join(sorted(names - set(arrays)))
            raise ValueError(f"{path} holds no {cls.what}: {missing} missing")
        with jaxtyped("context"):  # one size per letter, over all arrays
            for field in fields(cls):
                array = arrays[field.name]
                if not isinstance(array, field.type):  # type: ignore[arg-type]
                    raise ValueError(
                        f"{path} holds no {cls.what}: {field.name} is {array.dtype} "
                        f"{list(array.shape)}, which does not fit the other arrays"
                    )
        return cls(**{name: arrays[name] for name in names})
