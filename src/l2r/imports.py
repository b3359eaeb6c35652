"""Imports: names of a package on first use, code to run after one, and what to install for one.

Standard library alone: ``import l2r`` runs this.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from l2r.versions import TRIED, check_version

_EXTRAS = {tried.extra: package for package, tried in TRIED.items()}


class MissingExtraError(ImportError):
    """A package of an extra is missing, or of another version; the message says what to install."""


def lazy_names(
    package: str,
    extra: str | None = None,
    stand_in: Callable[[str, MissingExtraError], Any] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that imports each of its names on first use.

    The names are those that the package's source imports ``if TYPE_CHECKING``: written once, and
    read by type checkers too. ``extra`` installs what their modules need; while it is missing,
    ``stand_in`` makes what is returned instead of an error.
    """

    @cache
    def homes() -> dict[str, str]:
        import ast  # takes as long as the rest of ``import l2r``

        loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
        tree = ast.parse(loader.get_source(package))
        blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
        lines = [line for block in blocks for line in block if isinstance(line, ast.ImportFrom)]
        return {name.name: str(line.module) for line in lines for name in line.names}

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(homes())
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes()[name]
        try:
            if home == package:  # a module of the package
                return import_module(f"{package}.{name}")
            return getattr(import_module(home), name)
        except ImportError as error:
            problem = named(error, extra) if extra else error
            if stand_in and isinstance(problem, MissingExtraError):
                return stand_in(name, problem)
            raise problem from error

    return get, lambda: sorted({*vars(sys.modules[package]), *homes()})


def named(error: ImportError, extra: str) -> ImportError:
    """Return the error that says which extra of ours brings what an import lacked."""
    if isinstance(error, MissingExtraError):
        return error
    package = _EXTRAS[extra]
    from importlib import metadata  # takes as long as the rest of ``import l2r``

    found = "none is installed"
    if getattr(error, "name", None) != package:
        found = f"{metadata.version(package)} is installed"
    return MissingExtraError(
        f"this part of l2r needs {package}>={TRIED[package].oldest}; {found} ({error}): "
        f"pip install 'l2r-moe[{extra}]'"
    )


def check_extra(extra: str) -> None:
    """Warn where the package of an extra is newer than those tried; one that is missing passes.

    Raises MissingExtraError where it is older than the oldest that works.
    """
    from importlib import metadata

    package = _EXTRAS[extra]
    try:
        check_version(package, metadata.version(package))
    except metadata.PackageNotFoundError:
        return  # the error of the import says what to install
    except ImportError as error:
        raise MissingExtraError(f"{error}: pip install -U 'l2r-moe[{extra}]'") from error


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
        """Return the module's spec as the other finders give it, or None for every other module."""
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
