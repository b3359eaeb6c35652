"""Triton's interpreter without its repetition: half of what the kernels' tests cost.

It replaces the functions of triton.language at a kernel's launch, and again at every call of one
jitted function by another, where nothing is left to replace.
"""

from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter


def replace_once() -> None:
    """Leave out the replacement where the functions are replaced already."""
    replace: Callable[[Any], Any] = interpreter._patch_lang

    def once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values()}
        modules = [m for m in (language, language.core) if id(m) in seen]
        if any(language.core.is_builtin(module.load) for module in modules):
            return replace(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = once
