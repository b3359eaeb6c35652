"""Damaged input meets the code as users have it: without the type checks of the test run."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture(autouse=True)
def _no_type_checks() -> Iterator[None]:
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
