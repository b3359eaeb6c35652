"""Names with hyphens and with underscores: one spelling is accepted for the other."""

import difflib
from collections.abc import Iterable
from pathlib import Path


def same_name(first: str, second: str) -> bool:
    """Whether names differ in hyphens and underscores alone: ``l2r-sips`` and ``l2r_sips``."""
    return first.replace("-", "_") == second.replace("-", "_")


def known_as(name: str, known: Iterable[str]) -> str:
    """The entry of ``known`` that ``name`` spells; ``name`` itself where none or several do."""
    names = set(known)
    alike = {other for other in names if same_name(name, other)}
    return next(iter(alike)) if name not in names and len(alike) == 1 else name


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: `` (did you mean 'rank'?)``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


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
