"""Reads a URL's bytes to their end: a connection that breaks is opened again where it broke."""

import io
import time
from collections.abc import Callable
from typing import Any

from l2r.errors import InputError, blames_input

# A readable binary file; the libraries that open URLs share no class for it.
BinaryFile = Any
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further try without a byte in between
_BLOCK = 1 << 16  # bytes that are read at a time, where a stream cannot go to a place


class UnreachableError(InputError):
    """A URL whose bytes stop coming; what came is whole, and nothing is known of the rest."""


class WholeStream(io.RawIOBase):
    """The bytes that ``opened()`` gives, in spite of faults of the network.

    An error while bytes are read, or an end before the stated size, opens the URL again at the
    place that was reached. Raises UnreachableError, which names the URL, after six tries without a
    byte, and at once where the URL is gone or forbidden.
    """

    def __init__(self, url: str, opened: Callable[[], BinaryFile]) -> None:
        super().__init__()
        self._url, self._opened = url, opened
        self._stream: BinaryFile | None = opened()
        size = getattr(self._stream, "size", None)
        self._size = size if isinstance(size, int) else None
        self._place = 0

    def readable(self) -> bool:
        """Whether bytes can be read: always."""
        return True

    def seekable(self) -> bool:
        """Whether ``seek`` works: where the size is known."""
        return self._size is not None

    def tell(self) -> int:
        """Bytes from the start."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte; the next read brings the stream there."""
        if self._size is None:
            raise io.UnsupportedOperation("a stream of unknown size")
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, start + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as bytes have come; 0 at the end."""
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def close(self) -> None:
        """Close the connection."""
        self._drop()
        super().close()

    def _read(self, size: int) -> bytes:
        for wait in (*_WAITS, None):
            try:
                return self._read_once(size)
            except Exception as error:  # of any kind, by protocol and version
                if not _is_of_network(error):
                    raise
                self._drop()
                reason = " ".join(str(error).split()) or type(error).__name__
                if wait is None or isinstance(error, FileNotFoundError | PermissionError):
                    raise UnreachableError(
                        f"shard {self._url} stopped coming at byte {self._place:,}: {reason}; run "
                        f"the command again to go on"
                    ) from error
            time.sleep(wait)
        raise AssertionError

    def _read_once(self, size: int) -> bytes:
        if self._stream is None:
            self._stream = self._opened()
        stream = self._stream
        if stream.tell() != self._place:
            _go(stream, self._place)
        data = bytes(stream.read(size))
        if not data and size and self._place < (self._size or 0):
            raise UnreachableError(f"it ended before its {self._size:,} bytes")
        return data

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        try:
            if stream is not None:
                stream.close()
        except Exception as error:  # of a connection that is broken already
            if not _is_of_network(error):
                raise


def _is_of_network(error: Exception) -> bool:
    return isinstance(error, OSError) or blames_input(error)


def _go(stream: BinaryFile, place: int) -> None:
    """Bring a stream to a place, by reading up to it where it cannot seek."""
    try:
        stream.seek(place)
    except (OSError, ValueError):
        while (left := place - stream.tell()) > 0 and stream.read(min(left, _BLOCK)):
            pass
        if stream.tell() != place:
            raise UnreachableError(f"it cannot be read from byte {place:,} on") from None
