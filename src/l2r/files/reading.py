"""Reads JSON and YAML of a folder that may be a stranger's: within limits, or one line why not.

Values that our own files hold are nested a few levels deep and take kilobytes. The limits are far
above that, and below what a parser or what comes after it could choke on.
"""

import hashlib
import json
import math
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from l2r.errors import InputError, PathError, blames_input, using

MAX_BYTES = 1 << 28  # of one file or line; as Python objects it takes some ten times as much memory
MAX_DEPTH = 64  # levels; Python gives up at a thousand, what copies or prints a value earlier
MAX_PARTS = 1 << 22  # lists and objects of a JSON text: an empty one is 2 bytes there, 64 in memory
MAX_VALUES = 100_000  # of a YAML file whose aliases are written out
_LFS, _LFS_BYTES = b"version https://git-lfs.github.com/spec/", 1024  # how pointers begin; at most
_NAME = 255  # bytes of a file's name, at most
_WEIGHTS = (".safetensors", ".bin")
_OF_SHELLS = (("/", "dev"), ("/", "proc"))  # /dev/fd/63, /proc/self/fd/63
_SHOWN_VALUE = 200  # characters of a value in an error


def read_bytes(path: Path) -> bytes:
    """Read a file of at most ``MAX_BYTES``. Raises ValueError for a larger one, or OSError."""
    refuse_endless(path)
    with using(path), path.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InputError(f"it must have at most {MAX_BYTES:,} bytes")
    return data


def refuse_endless(path: Path, max_bytes: int | None = None) -> None:
    """Raise ValueError for a pipe or a device, and for a file of more than ``max_bytes`` bytes.

    Opening a pipe waits, perhaps for ever, for somebody to write. One that a shell made for this
    process, ``<(command)``, has a writer. A path that is not there, or a folder, passes.
    """
    try:
        found = path.stat()
    except OSError:
        return
    folder_or_file = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    if not folder_or_file and path.absolute().parts[:2] not in _OF_SHELLS:
        raise InputError(f"{path} is no regular file")
    if max_bytes is not None and found.st_size > max_bytes:
        raise InputError(f"{path} must have at most {max_bytes:,} bytes; it has {found.st_size:,}")


def refuse_pointer(path: Path) -> None:
    """Raise ValueError for a file that holds git-lfs's pointer in place of what it should."""
    with using(path):
        small = path.is_file() and path.stat().st_size <= _LFS_BYTES
        if small and _begins(path, _LFS):
            raise InputError(f"{path} is a git-lfs pointer: run git lfs pull")


def _begins(path: Path, sign: bytes) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(sign)) == sign


def parse_json(text: bytes, kind: type = dict, *, strict: bool = True) -> Any:
    """Parse the one value of a JSON text, of the type ``kind``: dict or list.

    ``strict`` refuses what JSON has no meaning for: a name twice in one object, NaN, infinities.
    Raises ValueError, in one line that does not name the file.
    """
    if (parts := text.count(b"[") + text.count(b"{")) > MAX_PARTS:
        raise InputError(f"it has more than {MAX_PARTS:,} lists and objects")
    hooks: Any = {"object_pairs_hook": _unique, "parse_constant": _refused, "parse_float": _finite}
    try:
        value = json.loads(text.decode("utf-8-sig"), **(hooks if strict else {}))
    except UnicodeDecodeError as error:
        raise InputError(f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:  # no JSON, or a number of more digits than Python reads
        raise InputError(str(error)) from error
    if not isinstance(value, kind):
        name = "object" if kind is dict else "list"
        raise InputError(f"it must be a JSON {name}; got {type(value).__name__}")
    if parts > MAX_DEPTH:
        _refuse_deep(value)
    return value


def read_json(path: Path, *, strict: bool = True) -> dict[str, Any]:
    """Read the JSON object of a file. Raises ValueError, in one line, for any other file."""
    try:
        return parse_json(read_bytes(path), strict=strict)
    except PathError:
        raise
    except ValueError as error:
        raise InputError(f"{path} is not a readable JSON object: {error}") from error


def indexed_files(index: Path) -> list[Path]:
    """List the files beside an index of weights that its ``weight_map`` names, sorted.

    Raises ValueError for an index without names, and for a name with a folder in it, which could
    be of any file of the machine.
    """
    places = read_json(index, strict=False).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(n, str) for n in places.values()):
        raise InputError(f"{index} must have weight_map, an object of file names")
    for name in places.values():
        refuse_other_folders(name, index.name)
        if not name.endswith(_WEIGHTS):
            raise InputError(f"{index} must name {' or '.join(_WEIGHTS)}; got {name!r:.80}")
    return [index.with_name(name) for name in sorted(set(places.values()))]


def refuse_other_folders(name: str, where: str) -> None:
    """Raise ValueError unless ``name``, given by ``where``, is that of a file beside it."""
    too_long = len(name.encode(errors="surrogatepass")) > _NAME
    if too_long or name in {"", ".", ".."} or any(sign in name for sign in "/\\\0"):
        raise InputError(f"{where} must name files of its folder; got {name!r:.80}")


def parse_yaml(text: str | bytes) -> Any:
    """Parse the one value of a YAML text, without tags of Python's.

    Aliases count as what they stand for. Raises ValueError, in one line, for a name twice in one
    mapping, too many levels or values, and what is not YAML.
    """
    import yaml  # the rest of this room needs no package

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError:
        raise InputError(f"it is nested more than {MAX_DEPTH} levels deep") from None
    except Exception as error:  # dates and numbers that are none raise errors of any kind
        if not blames_input(error):
            raise
        raise InputError(" ".join(str(error).split()) or type(error).__name__) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the YAML mapping of a file. Raises ValueError, in one line, for any other file."""
    try:
        values = parse_yaml(read_bytes(path))
        if not isinstance(values, dict):
            raise InputError(f"it must be a mapping of fields; got {type(values).__name__}")
        return values
    except PathError:
        raise
    except ValueError as error:
        raise InputError(f"{path} is not valid YAML: {error}") from error


def _refuse_deep(value: Any) -> None:
    """Raise ValueError for a value of more than MAX_DEPTH levels: what copies it calls itself."""
    level = [value]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [below for part in parts for below in part if isinstance(below, dict | list)]
        if not level:
            return
    raise InputError(f"it is nested more than {MAX_DEPTH} levels deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twice([name for name, _ in pairs])
    return dict(pairs)


def _refuse_twice(names: list[str]) -> None:
    if len(set(names)) < len(names):
        ((name, _),) = Counter(names).most_common(1)
        raise InputError(f"it has {name!r:.80} twice")


def _refused(constant: str) -> float:
    raise InputError(f"numbers must be finite; got {constant}")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text)


def _check(node: Any, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """Values below a YAML node with aliases written out, and its levels; ``known`` by node."""
    if id(node) in known:
        counted = known[id(node)]
        if counted is None:
            raise InputError("it has an alias inside what the alias stands for")
        return counted
    known[id(node)] = None
    parts = [] if isinstance(node.value, str) else list(node.value)
    if parts and isinstance(parts[0], tuple):
        _refuse_twice([key.value for key, _ in parts if isinstance(key.value, str)])
        parts = [part for pair in parts for part in pair]
    counts = [_check(part, known) for part in parts]
    values = 1 + sum(below for below, _ in counts)
    levels = 1 + max((below for _, below in counts), default=0)
    if values > MAX_VALUES:
        raise InputError(f"it has more than {MAX_VALUES:,} values with its aliases written out")
    if levels > MAX_DEPTH:
        raise InputError(f"it is nested more than {MAX_DEPTH} levels deep")
    known[id(node)] = values, levels
    return values, levels


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in blocks."""
    with using(path), path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_change(change: str) -> tuple[str, Any]:
    """Field and value of ``key.sub=value``. Raises ValueError unless it is that, in YAML."""
    field, separator, text = change.partition("=")
    if not separator or not field:
        raise InputError(f"changes must look like key.sub=value; got {change!r}")
    try:
        return field, parse_yaml(text)
    except InputError as error:
        shown = text if len(text) <= _SHOWN_VALUE else f"{text[:_SHOWN_VALUE]}..."
        raise InputError(f"{field} has a value that is not valid YAML: {shown!r}") from error
