"""Errors that a person can mend, apart from bugs of this package.

What somebody gave, an option, a field, a file, a folder, a size, is refused with InputError, in one
line; every other exception that leaves this package is a bug in it. InputError is a ValueError, and
docstrings say "Raises ValueError". Standard library alone: commands and exports import this.
"""

import errno
import os
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from l2r.laboratory import PACKAGE

# Of a disk that is full, broken or read-only: libraries do not always say which file it was.
DISK = {getattr(errno, name, -1) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EROFS")}

_OURS = ("l2r", PACKAGE)  # packages whose errors are bugs, wherever they are installed
_SHOWN = 600  # characters of a path; more are cut off

# What torch says of sizes that no machine has.
_TOO_LARGE = (
    "can't allocate memory",
    "Storage size calculation overflowed",
    "Overflow when unpacking",
)


class InputError(ValueError):
    """Something that was given cannot be used; the message names it, its value, what is allowed.

    Commands print it in one line and end with exit code 2.
    """


class PathError(OSError, InputError):
    """A path that was given and that the operating system refuses; it has OSError's attributes."""

    def __str__(self) -> str:
        if not (self.filename and self.strerror):
            return super().__str__()
        reason = str(self.strerror)[0].lower() + str(self.strerror)[1:]
        # the second path is where a finished file is moved
        name = str(self.filename2 or self.filename)
        shown = (
            name if len(name) <= _SHOWN else f"{name[: _SHOWN // 2]}... ({len(name):,} characters)"
        )
        return f"cannot use {shown}: {reason}"


@contextmanager
def using(*paths: str | Path, disk: bool = True) -> Iterator[None]:
    """Turn what the operating system says of these paths, inside the block, into a PathError.

    Of a path is an error that names it, a folder above it or a file below it, and one of a full or
    broken disk that names nothing, such as those of libraries written in Rust: it gets the first
    one's name, unless ``disk`` is false. Other errors pass.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError):
            raise
        given = (getattr(error, "filename", None), getattr(error, "filename2", None))
        names = [os.fsdecode(n) for n in given if isinstance(n, str | bytes | os.PathLike)]
        number = _number(error)
        if number is None:
            raise
        if disk and not names and number in DISK:
            raise PathError(number, os.strerror(number), str(paths[0])) from error
        if any(_related(name, path) for name in names for path in paths):
            raise PathError(number, os.strerror(number), names[-1]) from error
        raise


@contextmanager
def sizes(what: str = "a size") -> Iterator[None]:
    """Turn what Python and torch say of numbers that no machine has into an InputError."""
    try:
        yield
    except OverflowError as error:
        raise InputError(f"{what} is too large: {error}") from error
    except (RuntimeError, TypeError) as error:
        if not any(words in str(error) for words in _TOO_LARGE):
            raise
        raise InputError(f"{what} is too large: {str(error).splitlines()[0]}") from error


def environment_number(name: str, default: int) -> int:
    """Read the whole number in an environment variable. Raises InputError for anything else."""
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InputError(f"variable {name} must be a whole number; got {text!r:.80}") from None


def blames_input(error: BaseException) -> bool:
    """Tell whether an error of code that reads what was given says what is wrong with it.

    That is an InputError, and any error that another package, or code which a checkpoint's folder
    brings, has raised. One of the same kind from a line of this package is a bug in it.
    """
    return isinstance(error, InputError) or _is_foreign(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the machine has too little memory, no bug; torch says so in three ways."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and _TOO_LARGE[0] in str(error))
    )


def _is_foreign(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    root = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
    file = trace.tb_frame.f_code.co_filename
    if type(error) is Exception:  # those of libraries in Rust, which have no line of Python
        return True
    return root not in _OURS and (root == "transformers_modules" or _is_installed(file))


def is_of_disk(error: BaseException) -> bool:
    """Tell whether the operating system refused to write or read."""
    return isinstance(error, OSError) or _number(error) in DISK


def _number(error: BaseException) -> int | None:
    """Return the operating system's number of an error, None where it has none."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))  # in Rust's words
    return int(match[1]) if match else None


def _is_installed(file: str) -> bool:
    """Tell whether a source file is of Python or of a package in its folders."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    parts = Path(file).parts
    return (
        file.startswith("<frozen")
        or any(file.startswith(folder + os.sep) for folder in folders)
        or any(name in parts for name in ("site-packages", "dist-packages"))
    )


def _related(name: str, path: str | Path) -> bool:
    """Tell whether a file is a path, below it or above it, by their names."""
    one, other = Path(name).absolute(), Path(path).absolute()
    return one.is_relative_to(other) or other.is_relative_to(one)
