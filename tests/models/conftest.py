"""Models load quietly in tests."""

import pytest
from transformers.utils import logging


@pytest.fixture(autouse=True, scope="session")
def _no_progress_bars():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
