"""Routers from outside of this package, as the user's environment says: L2R_IMPORT, entry points.

Importing such a file registers its routers. Nothing that is read from a checkpoint or a recipe
chooses what is imported.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from l2r.errors import InputError

_VARIABLE, _GROUP = "L2R_IMPORT", "l2r.routers"


def import_named_modules() -> None:
    """Import the modules that L2R_IMPORT names, separated by commas.

    The working folder counts, after every other place: it stands at the end of ``sys.path`` from
    then on. Raises ValueError for a module that cannot be imported.
    """
    names = [name.strip() for name in os.environ.get(_VARIABLE, "").split(",")]
    for name in filter(None, names):
        _load(f"{_VARIABLE} names {name!r}", partial(_import_from_here_too, name))


def import_entry_points() -> None:
    """Load the entry points ``l2r.routers`` of installed packages.

    Raises ValueError for one that cannot be loaded.
    """
    for point in _entry_points():
        _load(f"a package has the entry point {point.name!r} of {_GROUP}", point.load)


@cache
def _entry_points() -> tuple[Any, ...]:
    from importlib.metadata import entry_points

    return tuple(entry_points(group=_GROUP))


def _import_from_here_too(name: str) -> None:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.import_module(name)


def _load(what: str, load: Callable[[], Any]) -> None:
    try:
        load()
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{what}, which cannot be imported: {reason}") from error
