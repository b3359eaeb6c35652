"""Text that people write and read: names in two spellings, numbers of tokens, safe characters."""

import difflib
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path

from l2r.errors import InputError

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Control characters but tabs and ends of lines, what turns the direction of writing, and halves of
# characters, which no stream takes: a name of a file that is not UTF-8 has them.
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def same_name(first: str, second: str) -> bool:
    """Tell whether names differ only in hyphens and underscores: ``l2r-sips``, ``l2r_sips``."""
    return first.replace("-", "_") == second.replace("-", "_")


def known_as(name: str, known: Iterable[str]) -> str:
    """Return the entry of ``known`` that ``name`` spells; ``name`` itself if none or several do."""
    names = set(known)
    alike = {other for other in names if same_name(name, other)}
    return next(iter(alike)) if name not in names and len(alike) == 1 else name


def nearest(name: str, known: Iterable[str]) -> str:
    """Write a hint for a misspelt name: `` (did you mean 'rank'?)``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def named_path(path: str | Path) -> Path:
    """Return the absolute path whose names are the user's: a link keeps its own, ``.`` is gone."""
    return Path(os.path.abspath(path))  # noqa: PTH100  resolve() follows links


def existing_path(path: str | Path) -> Path:
    """``path``, or where it is missing, the sibling path whose names spell the same.

    Every part is looked for in the folder before it; ``path`` itself where one has no match.
    """
    wanted = Path(path)
    if wanted.exists():
        return wanted
    existing = Path(wanted.anchor)
    parts = wanted.parts[1:] if wanted.anchor else wanted.parts
    for part in parts:
        if not existing.is_dir():
            return wanted
        name = (
            part
            if (existing / part).exists()
            else known_as(part, (p.name for p in existing.iterdir()))
        )
        existing /= name
        if not existing.exists():
            return wanted
    return existing


def parse_tokens(text: str) -> int:
    """Parse a number of tokens: ``200B``, ``1.5T``, ``500M`` or plain digits.

    Raises ValueError for anything else, and for less than one token.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper())
    count = 0.0 if match is None else float(match[1]) * _SUFFIXES[match[2]]
    if not 1 <= count < math.inf:
        raise InputError(f"tokens must look like 200B, 1.5T or 500000; got {text!r}")
    return round(count)


def printable(text: str) -> str:
    """Write ``\\u001b`` for an escape character and the like: JSON keeps its meaning."""
    return _STEERS.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text)


def one_cell(text: str) -> str:
    """Text that neither ends a cell of a Markdown table nor its row."""
    return " ".join(text.splitlines()).replace("|", "\\|")
