"""Run code after a module of another package was imported, without importing it.

Standard library alone: ``import l2r`` runs this.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


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
