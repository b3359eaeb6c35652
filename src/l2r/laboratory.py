"""Find names of the laboratory (``l2r_lab``), which stands on this package and may be absent.

The library never imports the laboratory by a line of code; it asks here, by name.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from l2r.imports import MissingExtraError

PACKAGE = "l2r_lab"


def has_laboratory() -> bool:
    """Tell whether ``l2r_lab`` can be imported."""
    return find_spec(PACKAGE) is not None


def of_laboratory(module: str, name: str) -> Any:
    """``name`` of ``l2r_lab.MODULE``; None where the laboratory is not installed."""
    return getattr(import_module(f"{PACKAGE}.{module}"), name) if has_laboratory() else None


def need_laboratory(module: str, name: str, what: str) -> Any:
    """``name`` of ``l2r_lab.MODULE``.

    Raises MissingExtraError, which names ``what`` needs it, where the laboratory is not installed.
    """
    found = of_laboratory(module, name)
    if found is None:
        raise MissingExtraError(f"{what} needs the package {PACKAGE}: pip install 'l2r-moe[lab]'")
    return found
