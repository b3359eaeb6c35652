"""Run-time checks of shapes that cost no more than they find.

pytest's import hook decorates each function of the checked packages, some 1,400. Here a function
is decorated when it is first called, and a test checks its first 10 calls of each: a search
that calls one function a million times learns nothing from the rest.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from importlib.machinery import SourceFileLoader
from types import CodeType
from typing import Any
from unittest.mock import patch

import jaxtyping
from jaxtyping import _import_hook

CALLS = 10
_decorate = jaxtyping.jaxtyped
_test = 0


def begin_test() -> None:
    """Check each function's next calls again."""
    global _test  # noqa: PLW0603
    _test += 1


def jaxtyped(*given: Any, **options: Any) -> Any:
    """``jaxtyping.jaxtyped``, later and not for ever; all but its use by the hook as there."""
    return _decorate(*given, **options) if given else _limited(**options)


def _limited(typechecker: Any) -> Callable[[Any], Any]:
    def decorate(checked: Any) -> Any:
        if inspect.isclass(checked):
            return _decorate(checked, typechecker=typechecker)
        checking, test, calls = None, -1, 0

        @wraps(checked)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal checking, test, calls
            if jaxtyping.config.jaxtyping_disable:
                return checked(*args, **kwargs)
            if test != _test:
                test, calls = _test, 0
            if calls == CALLS:
                return checked(*args, **kwargs)
            calls += 1
            checking = checking or _decorate(checked, typechecker=typechecker)
            return checking(*args, **kwargs)

        return call

    return decorate


def code_of(loader: Any, name: str) -> CodeType | None:
    """Find the bytecode of a checked module under jaxtyping's name for it.

    jaxtyping looks so while the module runs: what it imports (torch._dynamo, transformers,
    pandas) is then looked for under that name too, and compiled from source in each process.
    """
    spelled = partial(_import_hook._optimized_cache_from_source, loader._typechecker.get_hash())
    with patch("importlib._bootstrap_external.cache_from_source", spelled):
        return SourceFileLoader.get_code(loader, name)


def install() -> None:
    """Put both into jaxtyping's import hook; before the first checked module is imported."""
    jaxtyping.jaxtyped = jaxtyped
    _import_hook._JaxtypingLoader.get_code = code_of
    _import_hook._JaxtypingLoader.exec_module = SourceFileLoader.exec_module
