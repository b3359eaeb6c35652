"""Reads a URL's bytes to their end: a connection that breaks is opened again where it broke."""

import io
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from l2r.errors import InputError, blames_input

# A readable binary file; the libraries that open URLs share no class for it.
BinaryFile = Any
_WAITS = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further try without a byte in between
_BLOCK = 1 << 16  # bytes that are read at a time, where a stream cannot go to a place
# Libraries of networks whose errors are not all OSErrors.
_NETWORKS = {"aiohttp", "httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"}
_AGAIN = {408, 425, 429}  # HTTP's answers below 500 that ask to come again
_T = TypeVar("_T")


class UnreachableError(InputError):
    """A source that cannot be reached, or whose bytes stop coming; nothing is known of the rest."""


def keep_trying(what: str, call: Callable[[], _T]) -> _T:
    """Return what ``call()`` returns, in spite of passing faults of the network.

    Raises UnreachableError, which names ``what`` was asked for, after six tries. What is no fault
    of the network, such as a URL that is gone or forbidden or of an unknown kind, or a network that
    the user has switched off, is raised at once as it is.
    """
    for wait in (*_WAITS, None):
        try:
            return call()
        except Exception as error:  # of any kind, by protocol and version
            if not _is_passing(error):
                raise
            if wait is None:
                raise UnreachableError(
                    f"{what} cannot be reached: {_reason(error)}; run the command again to go on"
                ) from error
        time.sleep(wait)
    raise AssertionError


class WholeStream(io.RawIOBase):
    """The bytes that ``opened()`` gives, in spite of faults of the network.

    An error while bytes are read, or an end before the stated size, opens the URL again at the
    place that was reached; so does one while it is opened. Raises UnreachableError, which names the
    URL, after six tries without a byte, and at once where the URL is gone or forbidden.
    """

    def __init__(self, url: str, opened: Callable[[], BinaryFile]) -> None:
        super().__init__()
        self._url, self._opened = url, opened
        self._stream: BinaryFile | None = keep_trying(f"shard {url}", opened)
        size = getattr(self._stream, "size", None)
        self._size = size if isinstance(size, int) else None
        self._place = 0

    def readable(self) -> bool:
        """Tell whether bytes can be read: always."""
        return True

    def seekable(self) -> bool:
        """Tell whether ``seek`` works: if the size is known."""
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
                if wait is None or _is_gone(error):
                    raise UnreachableError(
                        f"shard {self._url} stopped coming at byte {self._place:,}: "
                        f"{_reason(error)}; run the command again to go on"
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


def _is_passing(error: Exception) -> bool:
    """Tell whether the same request may succeed a moment later."""
    causes = list(_causes(error))
    if any(type(part).__name__ == "OfflineModeIsEnabled" for part in causes):  # HF_HUB_OFFLINE
        return False
    return not _is_gone(error) and any(
        isinstance(part, OSError) or type(part).__module__.partition(".")[0] in _NETWORKS
        for part in causes
    )


def _is_gone(error: Exception) -> bool:
    """Tell whether the URL is not there or forbidden: fsspec says so of a reset connection, too.

    So the cause of an error decides, and an answer of HTTP before it.
    """
    *_, first = causes = list(_causes(error))
    answers = [getattr(part, "status", None) for part in causes]
    answers += [getattr(getattr(part, "response", None), "status_code", None) for part in causes]
    if any(isinstance(a, int) and 400 <= a < 500 and a not in _AGAIN for a in answers):
        return True
    return isinstance(first, FileNotFoundError | PermissionError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """List an error, the one that it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _reason(error: Exception) -> str:
    """Say an error in one line; of a URL that seems to be gone, its cause."""
    *_, first = _causes(error)
    return " ".join(str(first).split()) or type(first).__name__


def _go(stream: BinaryFile, place: int) -> None:
    """Bring a stream to a place, by reading up to it where it cannot seek."""
    try:
        stream.seek(place)
    except (OSError, ValueError):
        while (left := place - stream.tell()) > 0 and stream.read(min(left, _BLOCK)):
            pass
        if stream.tell() != place:
            raise UnreachableError(f"it cannot be read from byte {place:,} on") from None
