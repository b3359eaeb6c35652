"""Reads the documents of one shard: JSON lines (plain, gzip, zstandard) or Parquet.

A shard is a local path or a URL that fsspec knows (``hf://datasets/...`` streams from the
Hugging Face hub without storing the shard). Every document needs a string field ``text``.
"""

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from l2r.runs.reading import MAX_BYTES, parse_json

# A readable binary file; the libraries that open shards share no class for it.
BinaryFile = Any


class BadShardError(ValueError):
    """A shard that is truncated, corrupt or of another schema; the message names it."""


def open_shard(url: str) -> BinaryFile:
    """Open a shard for reading bytes."""
    if "://" not in url:
        return Path(url).open("rb")
    import fsspec

    return fsspec.open(url, "rb").open()


def shard_bytes(url: str) -> int:
    """Stored (compressed) size of a shard."""
    if "://" not in url:
        return Path(url).stat().st_size
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(url)
    return int(filesystem.size(path))


def read_texts(stream: BinaryFile, name: str) -> Iterator[str]:
    """Texts of a shard's documents, in order; ``name`` tells the format and names it in errors.

    Raises BadShardError when the shard is truncated, corrupt, empty or lacks ``text``.
    """
    reader = next((read for suffix, read in _READERS.items() if name.endswith(suffix)), None)
    if reader is None:
        raise BadShardError(f"shard {name} must end in {' '.join(_READERS)}")
    count = 0
    try:
        for document in reader(stream):
            text = document["text"]
            if not isinstance(text, str):
                raise TypeError(f"field 'text' must be a string; got {type(text).__name__}")
            yield text
            count += 1
    except KeyError as error:
        raise BadShardError(f"shard {name}: document {count} has no field {error}") from error
    except (OSError, EOFError, zlib.error, ValueError, TypeError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise BadShardError(
            f"shard {name} is truncated or corrupt after document {count}: {reason}"
        ) from error
    if count == 0:
        raise BadShardError(f"shard {name} holds no documents")


def _json_lines(stream: Any) -> Iterator[dict[str, Any]]:
    while line := stream.readline(MAX_BYTES + 1):
        if len(line) > MAX_BYTES:
            raise ValueError(f"a document must have at most {MAX_BYTES:,} bytes")
        yield parse_json(line, strict=False)


def _gzip_lines(stream: BinaryFile) -> Iterator[dict[str, Any]]:
    with gzip.GzipFile(fileobj=stream) as lines:
        yield from _json_lines(lines)


class _Borrowed:
    """A stream that pyarrow cannot close: it belongs to whoever opened it."""

    def __init__(self, stream: BinaryFile) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        """Leave it open."""


def _zstd_lines(stream: BinaryFile) -> Iterator[dict[str, Any]]:
    import io

    import pyarrow

    borrowed = pyarrow.PythonFile(_Borrowed(stream), "r")
    with pyarrow.CompressedInputStream(borrowed, "zstd") as lines:
        yield from _json_lines(io.BufferedReader(lines, 1 << 20))


def _parquet_rows(stream: BinaryFile) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet

    with parquet.ParquetFile(stream) as file:
        if "text" not in file.schema_arrow.names:
            raise KeyError("text")
        for batch in file.iter_batches(batch_size=256, columns=["text"]):
            yield from batch.to_pylist()


# By ending; the first match reads the shard.
_READERS: dict[str, Callable[[BinaryFile], Iterator[dict[str, Any]]]] = {
    ".json.gz": _gzip_lines,
    ".jsonl.gz": _gzip_lines,
    ".json.zst": _zstd_lines,
    ".jsonl.zst": _zstd_lines,
    ".json.zstd": _zstd_lines,
    ".jsonl.zstd": _zstd_lines,
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".parquet": _parquet_rows,
}
SHARD_SUFFIXES = tuple(_READERS)
