"""A Chromium for the tests of pages; they are skipped where there is none."""

import shutil

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser():
    """The browser of a test process: playwright can be started once in a thread at a time."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright: l2r-moe[browser]"
    )
    if (chromium := next(filter(None, map(shutil.which, _NAMES)), None)) is None:
        pytest.skip("needs chromium on the PATH")
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        yield driver.chromium.launch(executable_path=chromium, args=flags)
