"""Reads the documents of one shard: JSON lines (plain, gzip, zstandard), Parquet or plain text.

A shard is a local path or a URL that fsspec knows (``hf://datasets/...`` streams from the
Hugging Face hub without storing the shard). Every document needs a string field ``text``; a file of
plain text is one document, and ``FOLDER/*.txt`` is one shard of all text files below a folder.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from l2r.errors import InputError, blames_input
from l2r.files.reading import MAX_BYTES, parse_json
from l2r.text.streams import BinaryFile, UnreachableError, WholeStream, keep_trying

# A number for errors, and the document: as it stands in its line, or read.
Documents = Iterator[tuple[int, Any]]
TEXT_FILES = "*.txt"
_ROWS = 1 << 28  # bytes of Parquet's rows that are held at a time, by the sizes that the file gives
_BLOCK = 1 << 20  # bytes of a URL that are read at a time
_MAX_ROWS = 256  # rows that are held at a time


class BadShardError(InputError):
    """A shard that is truncated, corrupt or of another schema; the message names it."""


class _RefusedDocumentError(InputError):
    """A document that no reader takes, in a file that is whole."""


def open_shard(url: str) -> BinaryFile:
    """Open a shard for reading bytes. Raises InputError for a URL that cannot be had.

    A URL's bytes go on after faults of the network; see :class:`WholeStream`.
    """
    if "://" in url:
        import fsspec

        with _naming(url):
            return io.BufferedReader(
                WholeStream(url, lambda: fsspec.open(url, "rb").open()), _BLOCK
            )
    path = Path(url)
    return _TextFiles(path.parent) if path.name == TEXT_FILES else path.open("rb")


def shard_bytes(url: str) -> int:
    """Return the stored (compressed) size of a shard. Raises InputError for a URL that fails."""
    if "://" in url:
        import fsspec

        with _naming(url):
            filesystem, path = fsspec.core.url_to_fs(url)
            return int(keep_trying(f"shard {url}", lambda: filesystem.size(path)))
    path = Path(url)
    files = text_files(path.parent) if path.name == TEXT_FILES else [path]
    return sum(file.stat().st_size for file in files)


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Turn what libraries of networks and file systems say of a URL into an InputError."""
    try:
        yield
    except UnreachableError:
        raise
    except Exception as error:  # of any kind, by protocol and version
        if not blames_input(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"shard {url} cannot be opened: {reason}") from error


def text_files(folder: Path) -> list[Path]:
    """List the ``*.txt`` below a folder, sorted, without hidden ones."""
    return sorted(path for path in folder.rglob(TEXT_FILES) if not path.name.startswith("."))


def plain_text(data: bytes, name: str) -> str:
    """Read the text of a file. Raises BadShardError, with the remedy, if it is not UTF-8."""
    try:
        text = data.decode()
        if "\0" not in text:
            return text
        place, what = data.index(0), "a zero byte"
    except UnicodeDecodeError as error:
        place, what = error.start, f"byte 0x{data[error.start]:02x}"
    likely = "utf-16" if 0 in data or data[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
    raise BadShardError(
        f"data {name} must be UTF-8; it has {what} at {place}. If it is {likely}: "
        f"iconv -f {likely} -t utf-8 FILE > NEW"
    )


def read_text_file(path: Path) -> str:
    """Read text from a file of any ending. Raises BadShardError for no text, or too much."""
    with path.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise BadShardError(f"data {path} must have at most {MAX_BYTES:,} bytes; split it")
    return plain_text(data, str(path))


def read_texts(stream: BinaryFile, name: str) -> Iterator[str]:
    """Texts of a shard's documents, in order; see :func:`read_numbered`."""
    return (text for _, text in read_numbered(stream, name))


def read_numbered(stream: BinaryFile, name: str) -> Iterator[tuple[int, str]]:
    """Line (or row, from 1) and text of a shard's documents, in order; 0 for a file of text.

    ``name`` gives the format and names the shard in errors. Empty lines are passed over. Raises
    BadShardError when the shard is truncated, corrupt, empty or lacks ``text``, UnreachableError
    when its bytes stop coming from a network or a disk, and MemoryError, which names the shard too.
    """
    reader = next((read for suffix, read in _READERS.items() if name.endswith(suffix)), None)
    if reader is None:
        raise BadShardError(f"shard {name} must end in {' '.join(_READERS)}")
    count, place = 0, ""
    try:
        for line, raw in reader(stream):
            place = f"line {line}: "
            document = parse_json(raw, strict=False) if isinstance(raw, bytes) else raw
            place = ""
            try:
                text = _text_of(document)
            except ValueError as error:
                raise BadShardError(f"shard {name}, line {line}: {error}") from error
            yield line, text
            count += 1
    except (BadShardError, UnreachableError):
        raise
    except _RefusedDocumentError as error:
        raise BadShardError(f"shard {name}, document {count + 1}: {error}") from error
    except KeyError as error:
        columns = str(error.args[0])
        raise BadShardError(f"shard {name}: no column 'text'; it has {columns}") from error
    except MemoryError as error:  # no fault of the shard, which must not be skipped for it
        reason = f"shard {name} needs more memory than there is, after document {count}"
        raise MemoryError(reason) from error
    except (OSError, EOFError, zlib.error, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        if _is_of_system(error):
            raise UnreachableError(
                f"shard {name} cannot be read after document {count}: {reason}"
            ) from error
        raise BadShardError(
            f"shard {name} is truncated or corrupt after document {count}: {place}{reason}"
        ) from error
    if count == 0:
        raise BadShardError(f"shard {name} holds no documents")


def _is_of_system(error: Exception) -> bool:
    """Tell whether the operating system failed to read, not a decoder, which has no errno."""
    return isinstance(error, ConnectionError | TimeoutError) or (
        isinstance(error, OSError) and error.errno is not None
    )


def _text_of(document: dict[str, Any]) -> str:
    if "text" not in document:
        raise InputError(f"no field 'text'; it has {', '.join(map(repr, document))}")
    if not isinstance(document["text"], str):
        kind = type(document["text"]).__name__
        raise InputError(f"field 'text' must be a string; got {kind}")
    return _whole_characters(document["text"])


def _whole_characters(text: str) -> str:
    """Write U+FFFD for half a surrogate pair: JSON can have it, no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class _TextFiles:
    """All text files below a folder as one stream: every ``read`` gives another file, whole."""

    def __init__(self, folder: Path) -> None:
        self._files = iter(text_files(folder))
        self._read = 0
        self.name = str(folder / TEXT_FILES)  # of the file that was read last

    def read(self, size: int = MAX_BYTES + 1) -> bytes:
        """Bytes of the next file that is not empty, at most ``size``; none at the end."""
        for path in self._files:
            with path.open("rb") as file:
                data = file.read(size)
            if data:
                self._read += len(data)
                self.name = str(path)
                return data
        return b""

    def tell(self) -> int:
        """Bytes read so far."""
        return self._read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing open: every file is closed once it is read."""


def _whole_files(stream: BinaryFile) -> Documents:
    data = stream.read(MAX_BYTES + 1)  # of a file without text, too
    while True:
        _refuse_larger(len(data))
        yield 0, {"text": plain_text(data, str(getattr(stream, "name", "from its URL")))}
        if not (data := stream.read(MAX_BYTES + 1)):
            return


def _lines(stream: Any) -> Documents:
    number = 0
    while line := stream.readline(MAX_BYTES + 1):
        number += 1
        _refuse_larger(len(line))
        if line.strip():
            yield number, line


def _refuse_larger(size: int) -> None:
    if size > MAX_BYTES:
        raise _RefusedDocumentError(f"a document must have at most {MAX_BYTES:,} bytes; split it")


def _gzip_lines(stream: BinaryFile) -> Documents:
    with gzip.GzipFile(fileobj=stream) as lines:
        yield from _lines(lines)


class _Borrowed:
    """Stream that pyarrow cannot close; its opener closes it."""

    def __init__(self, stream: BinaryFile) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None:
        """Leave it open."""


def _zstd_lines(stream: BinaryFile) -> Documents:
    import pyarrow

    borrowed = pyarrow.PythonFile(_Borrowed(stream), "r")
    with pyarrow.CompressedInputStream(borrowed, "zstd") as lines:
        yield from _lines(io.BufferedReader(lines, 1 << 20))


def _parquet_rows(stream: BinaryFile) -> Documents:
    from pyarrow import parquet, types

    row = 0
    with parquet.ParquetFile(stream) as file:
        names = file.schema_arrow.names
        if "text" not in names:
            raise KeyError(", ".join(names))
        kind = file.schema_arrow.field("text").type
        is_dictionary = types.is_dictionary(kind)
        kind = kind.value_type if is_dictionary else kind
        if types.is_nested(kind):  # of which a row may stand for any number of values
            raise _RefusedDocumentError(f"column 'text' must be strings; got {kind}")
        for group in range(file.num_row_groups):
            # A value that is stored once may stand in every row, and unpacks in each.
            largest = max(1, _text_bytes(file.metadata.row_group(group)))
            count = _MAX_ROWS if is_dictionary else min(max(1, _ROWS // largest), _MAX_ROWS)
            options = {"batch_size": count, "columns": ["text"], "use_threads": False}
            for batch in file.iter_batches(row_groups=[group], **options):
                for value in batch.column(0):
                    row += 1
                    text = value.value if is_dictionary and value.is_valid else value
                    if text.is_valid and hasattr(text, "as_buffer"):
                        _refuse_larger(text.as_buffer().size)
                    yield row, {"text": text.as_py()}


def _text_bytes(group: Any) -> int:
    """Unpacked size of the column ``text`` of a row group: of one value, where others repeat it."""
    columns = (group.column(number) for number in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema == "text")


# By ending; the first match reads the shard.
_READERS: dict[str, Callable[[BinaryFile], Documents]] = {
    ".txt": _whole_files,
    ".json.gz": _gzip_lines,
    ".jsonl.gz": _gzip_lines,
    ".json.zst": _zstd_lines,
    ".jsonl.zst": _zstd_lines,
    ".json.zstd": _zstd_lines,
    ".jsonl.zstd": _zstd_lines,
    ".jsonl": _lines,
    ".json": _lines,
    ".parquet": _parquet_rows,
}
TEXT_SUFFIXES = tuple(_READERS)
SHARD_SUFFIXES = TEXT_SUFFIXES[1:]  # of files with many documents
