"""Files that appear whole or not at all, and never at the other end of a link; JSON without NaN.

A folder may be a stranger's: a name in it that can be guessed may be a link to a file of the
user's. A temporary name is drawn for every file and must not exist; a link under the final
name is replaced, not followed; what is opened in place (a log, a lock) must be a regular file.
"""

import errno
import glob
import json
import math
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from l2r.errors import DISK, InputError, PathError, using

_HALVES = "backslashreplace"  # how halves of characters are written, which UTF-8 cannot have


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader or a crash never meets half of it.

    Half of a character, of which names of files that are not UTF-8 have some, becomes ``\\udcff``.
    """
    write_bytes(path, text.encode(errors=_HALVES))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a binary file in the same way."""
    with using(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary, stream = new_file(path)
        try:
            with stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            publish(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in the same way; keys keep their order, null is what is not finite."""
    write_text(path, plain_json(value) + "\n")


def copy_file(old: Path, new: Path) -> None:
    """Copy the content of a file; an error of the disk names the new one."""
    with using(old, new):
        try:
            shutil.copyfile(old, new)
        except OSError as error:
            if error.errno in DISK:
                raise PathError(error.errno, error.strerror, str(new)) from error
            raise


def new_file(path: Path) -> tuple[Path, BinaryIO]:
    """Open a file next to ``path`` that did not exist; its name, ``.NAME.….part``, is drawn.

    Raises ValueError where ``path`` is a pipe or a device, in whose place it would come.
    """
    _refuse_device(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        return temporary, temporary.open("xb")  # x: never an existing file, and never a link
    except OSError as error:
        raise PathError(error.errno, error.strerror, str(path)) from error


def _refuse_device(path: Path) -> None:
    """Raise ValueError for a pipe, a device or what leads to one: /dev/null, /dev/stdout."""
    with suppress(OSError):  # nothing there yet, or an end that is seen when it is written to
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise InputError(f"{path} is no regular file, and a file in its place would remove it")


def publish(temporary: Path, path: Path) -> None:
    """Give a finished file or folder its real name and store the new name."""
    with using(path):
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def append_text(path: Path, text: str) -> None:
    """Add to the end of a text file and hand it to the operating system.

    Raises ValueError where there is a link or anything else that is no regular file.
    """
    descriptor = _open_regular(path, os.O_WRONLY | os.O_APPEND)
    with using(path), os.fdopen(descriptor, "a", encoding="utf-8", errors=_HALVES) as stream:
        stream.write(text)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Lock a file, made if need be, for the block: whether this process got it.

    A lock dies with its process. Raises ValueError as ``append_text`` does, and OSError where the
    file system has no locks.
    """
    with os.fdopen(_open_regular(path, os.O_RDWR)) as stream:
        try:
            _lock(stream.fileno())
            mine = True
        except (BlockingIOError, PermissionError):  # the second: of Windows, and of some of NFS
            mine = False
        except OSError as error:
            raise PathError(error.errno, f"cannot lock {path}: {error.strerror}") from error
        yield mine


@contextmanager
def lock(path: Path, interval: float = 0.05) -> Iterator[None]:
    """Lock a file for the block; wait, looking every ``interval`` seconds, while another has it.

    Raises as ``try_lock`` does.
    """
    while True:
        with try_lock(path) as mine:
            if mine:
                yield
                return
        time.sleep(interval)


def _lock(descriptor: int) -> None:
    """Lock a file for this process until it closes it; OSError where another has it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def make_folder(root: Path, *names: str) -> Path:
    """Make ``root``, then folder after folder below it; the last one's path.

    ``root`` is what a person named and may be a link. Raises ValueError for a link below it.
    """
    with using(root):
        root.mkdir(parents=True, exist_ok=True)
        for name in names:
            root = root / name
            refuse_link(root)
            root.mkdir(exist_ok=True)
    return root


def check_place(folder: Path) -> None:
    """Raise PathError, before long work, where a folder cannot be made or written; make nothing."""
    with using(folder):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise PathError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(there))
    if not os.access(there, os.W_OK):
        raise PathError(errno.EACCES, os.strerror(errno.EACCES), str(there))


def check_file_place(path: Path) -> None:
    """Raise PathError, before long work, where a file cannot be written; make nothing."""
    if path.is_dir():
        raise PathError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    _refuse_device(path)
    check_place(path.parent)


def check_new_folder(out: Path) -> None:
    """Raise ValueError when ``out`` holds something already, OSError where it cannot be made."""
    if out.is_symlink():
        raise InputError(f"out must be a new or empty folder; got {out}, a link")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"out must be a new or empty folder; got {out}")
    check_place(out)
    if out.exists():  # it will be replaced, which needs its parent
        here = out.resolve()
        if here == Path.cwd() or here.is_mount():
            what = "a mount point" if here.is_mount() else "the folder you are in"
            raise InputError(
                f"out must be a new folder or one that can be replaced; got {out}, {what}: name a "
                "folder in it"
            )
        check_place(here.parent)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Make a folder to write into, which becomes ``out`` if the block ends without an error.

    Raises ValueError when ``out`` holds something already.
    """
    check_new_folder(out)
    with using(out), folder_beside(out) as part:
        try:
            yield part
        except OSError as error:
            there = Path(str(error.filename))
            if not there.is_relative_to(part):
                raise
            file = str(out / there.relative_to(part))  # the user knows of no hidden folder
            raise PathError(error.errno, error.strerror, file) from error
        part.replace(out)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Make a folder ``.NAME.….part`` next to a path for the block, and remove it at the end.

    Those of processes that were killed before they could remove theirs go first: each is locked
    while its process lives.
    """
    with using(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    for former in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}.part"):
        if former.is_dir() and not former.is_symlink():
            with suppress(OSError), _folder_lock(former):
                remove(former)
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        try:
            temporary.mkdir()
        except OSError as error:  # the user knows of no hidden folder
            raise PathError(error.errno, error.strerror, str(path)) from error
        with ExitStack() as held:
            try:
                held.enter_context(_folder_lock(temporary))
            except FileNotFoundError:  # another process took it for a killed one's
                continue
            except OSError:  # no locks here: then nothing is taken for a killed process's either
                pass
            try:
                yield temporary
            finally:
                remove(temporary)
            return


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder for the block; OSError where another has it, or where there are no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor)
        folder.stat()  # gone, if another had it until now
        yield
    finally:
        os.close(descriptor)


def refuse_link(path: Path) -> None:
    """Raise ValueError where ``path`` is a link."""
    if path.is_symlink():
        raise InputError(f"{path} is a link, and nothing is written through links; remove it")


def remove_unfinished(folder: Path) -> None:
    """Remove what a kill in the middle of a write left in a folder that nobody else writes to."""
    for path in folder.glob(".*.part"):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all in it; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _open_regular(path: Path, flags: int) -> int:
    """Open a regular file, made if need be; ValueError for a link, a pipe, a device."""
    refuse_link(path)  # O_NOFOLLOW is for one that comes between; it says so in fewer words
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):  # a pipe must not block
        flags |= getattr(os, name, 0)  # Windows has none of them
    with using(path):
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InputError(f"{path} is no regular file; remove it")
    return descriptor


def plain_json(value: Any, *, indent: int | None = 2) -> str:
    """JSON text of a value; null where a number is not finite. Without ``indent`` on one line."""
    separators = (",", ":") if indent is None else None
    return json.dumps(_finite(value), indent=indent, separators=separators, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
