"""Line on a bug in this package, and the file with which a user reports the bug.

Standard library alone: whatever broke, this works.
"""

import importlib.metadata
import os
import platform
import re
import shlex
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from l2r._version import __version__
from l2r.files.atomic import remove, write_text
from l2r.files.cache import cache_folder
from l2r.laboratory import PACKAGE

_KEPT = 20  # files
_WORD = 200  # characters of a word of the command line: a longer one may be a text of the user's
_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface-hub", "accelerate", "numpy",
    "triton", "pyarrow", "pillow", "pydantic", "typer", "starlette", "lm-eval",
)  # fmt: skip
_HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(?i)(token|secret|passw(or)?d|credential|api[-_]?key|access[-_]?key|auth)$"
)
_SECRETS = (
    re.compile(r"(?<=://)[^/\s'\"@]+(?=@)"),  # name and password of a URL
    re.compile(r"(?<=[?&])[^\s'\"]+"),  # what follows a URL's question mark; some are signatures
    re.compile(r"\b(?:hf_|sk-|gh[a-z]_|github_pat_|AKIA|xox[a-z]-|eyJ)[\w.-]{8,}"),
    re.compile(r"(?i)(?<=bearer )\S+"),
)


def report_bug(error: BaseException, words: Sequence[str]) -> str:
    """Write the file of a bug; the line that names it, without ``error:`` before it.

    ``words`` are those of the command line. Where no file can be written, the traceback follows
    the line.
    """
    text = bug_report(error, words)
    line = f"a bug in l2r, not in what it was given: {_in_short(error)}; please report it with "
    try:
        folder = cache_folder() / "bugs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        write_text(path, text)
        for former in sorted(folder.glob("*.txt"))[:-_KEPT]:
            remove(former)
    except (OSError, ValueError):
        return f"{line}what follows\n{text}"
    return f"{line}{path}"


def bug_report(error: BaseException, words: Sequence[str]) -> str:
    """Command, versions and traceback in plain text, without secrets and the home folder's name."""
    lines = [
        "A bug in l2r. Nothing was sent anywhere; read this before you pass it on.",
        "",
        f"command: {shlex.join(['l2r', *_plain_words(words)])}",
        *(f"{name}: {os.environ[name]}" for name in ("RANK", "WORLD_SIZE") if name in os.environ),
        f"l2r-moe: {__version__}",
        f"python: {platform.python_version()} on {platform.platform()}",
        *(f"{name}: {version}" for name in _PACKAGES if (version := _version(name))),
        "",
        *traceback.format_exception(error),
    ]
    return without_secrets("\n".join(lines))


def without_secrets(text: str) -> str:
    """Remove passwords, keys and tokens from a text: those of URLs and environment variables."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= 6:
            text = text.replace(value, _HIDDEN)
    for pattern in _SECRETS:
        text = pattern.sub(_HIDDEN, text)
    home = os.path.expanduser("~")  # noqa: PTH111, which fails where no home is known
    return text.replace(home, "~") if len(home) > 1 else text


def _plain_words(words: Sequence[str]) -> list[str]:
    """Words of a command line; the value of one that is named like a secret is hidden."""
    plain, hides = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if hides:
            plain.append(_HIDDEN)
        elif equals and _SECRET_NAME.search(name):
            plain.append(f"{name}={_HIDDEN}")
        else:
            plain.append(word if len(word) <= _WORD else f"{word[:_WORD]}...")
        hides = not hides and not equals and word.startswith("-") and _is_secret(word)
    return plain


def _is_secret(option: str) -> bool:
    return bool(_SECRET_NAME.search(option))


def _in_short(error: BaseException) -> str:
    """Kind, message and place of an error in one line: the last place of this package."""
    message = " ".join(without_secrets(str(error)).split())
    kind = f"{type(error).__name__}: {message}" if message else type(error).__name__
    library = Path(__file__).parents[1]
    packages = tuple(str(library.with_name(name)) + os.sep for name in ("l2r", PACKAGE))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename]
    ours = [f for f in frames if f.filename.startswith(packages)]
    if not (ours or frames):
        return kind
    frame = (ours or frames)[-1]
    place = Path(frame.filename)
    place = place.relative_to(library.parent) if ours else Path(place.name)
    return f"{kind} ({place}, line {frame.lineno})"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
