"""Damaged input meets the code as users have it: without the type checks of the test run."""

import pytest


@pytest.fixture(autouse=True)
def _as_users_have_it(unchecked: None) -> None:
    pass
