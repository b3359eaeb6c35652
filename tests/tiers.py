"""Which cases of a long list run in ``make test``: a few that differ in what they run through.

The others are marked slow, so that ``make test-slow`` runs them all the same.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

# Softmax over all, weights as they are; normalized; sigmoid, bias and groups; softmax over the
# chosen and a bias of the logits.
FAMILIES = ("olmoe", "mixtral", "deepseek_v3", "gpt_oss")


def few(cases: Iterable[Any], fast: Callable[[Any], bool] | Sequence[Any], why: str) -> list[Any]:
    """The same cases in their order; those that are not ``fast`` are slow, and ``why``."""
    is_fast = fast if callable(fast) else lambda case: case in fast
    return [case if is_fast(case) else _slow(case, why) for case in cases]


def _slow(case: Any, why: str) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow(why))


def few_families(names: Iterable[str]) -> list[Any]:
    """Families of models by name; four of them are fast."""
    return few(names, FAMILIES, "every family")
