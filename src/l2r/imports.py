"""Imports of other packages: code to run after one, and what to install where one is missing.

Standard library alone: ``import l2r`` runs this.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# Extra -> the package it is for, and the versions that do; pyproject's extras have the same bounds.
_EXTRAS = {"lm": ("transformers", ">=5.19,<6")}


class MissingExtraError(ImportError):
    """A package of an extra is missing, or of another version; the message says what to install."""


def named(error: ImportError, extra: str) -> ImportError:
    """The error that says which extra of ours brings what an import lacked."""
    if isinstance(error, MissingExtraError):
        return error
    package, versions = _EXTRAS[extra]
    from importlib import metadata  # takes as long as the rest of ``import l2r``

    found = "none is installed"
    if getattr(error, "name", None) != package:
        found = f"{metadata.version(package)} is installed"
    return MissingExtraError(
        f"this part of l2r needs {package}{versions}; {found} ({error}): "
        f"pip install 'l2r-moe[{extra}]'"
    )


class Missing:
    """Stands for a name of this package whose extra is missing; every use of it says so.

    So ``hasattr``, ``from l2r import *`` and tools that list a module work without the extra.
    """

    def __init__(self, name: str, error: ImportError) -> None:
        self.__name__, self.__doc__, self._error = name, str(error), error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the error of the import."""
        raise self._error

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._error


def after_import(name: str, action: Callable[[Any], object]) -> None:
    """Call ``action(module)`` when the module ``name`` was imported; now, if it is already."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, action))


class _Watch(MetaPathFinder):
    """A finder that leaves one module to the others, and adds an action to its loading."""

    def __init__(self, name: str, action: Callable[[Any], object]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec as the other finders give it, or None for every other module."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # once
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
