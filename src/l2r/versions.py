"""Versions of the packages that this one works with: an old one is refused, a new one is tried.

Nobody waits for a release of ours: what is newer than the versions tried gets a warning and runs.
Standard library alone: ``import l2r`` runs this.
"""

import re
import warnings
from typing import NamedTuple


class Tried(NamedTuple):
    """Versions tried of a package, from ``oldest`` on and before ``end``.

    ``oldest`` is the first that works; pyproject's ``extra`` has the same bound.
    """

    oldest: str
    end: str
    extra: str | None = None


TRIED = {  # by distribution
    "transformers": Tried("5.19", "5.25", "lm"),
    "ai2-olmo-core": Tried("3.0.0", "3.1", "olmo-core"),
    "megatron-core": Tried("0.16.1", "0.20", "megatron"),
    "torchtitan": Tried("0.3.0", "0.4", "torchtitan"),
    "vllm": Tried("0.32", "0.34"),
}


def check_version(package: str, installed: str) -> None:
    """Warn where ``installed`` is newer than the versions tried of ``package``.

    Raises ImportError, one line, where it is older than the oldest that works.
    """
    oldest, end, _ = TRIED[package]
    found = _release(installed)
    if found and found < _release(oldest):
        raise ImportError(f"{package} must be {oldest} or newer; got {installed}")
    if not found or found >= _release(end):  # "dev" may be anything
        warnings.warn(
            f"{package} {installed} is newer than the versions that l2r was tried with "
            f"(from {oldest}, before {end})",
            stacklevel=2,
        )


def _release(version: str) -> tuple[int, ...]:
    """Numbers at the start of a version without zeros at their end: (5, 24) of 5.24.0.dev0."""
    numbers = re.sub(r"[^\d.].*", "", version)
    return tuple(int(part) for part in re.sub(r"(\.0+)*\.?$", "", numbers).split(".") if part)
