"""A Chromium for the tests of pages; they are skipped where there is none."""

import shutil
import time

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def wait_until(tab, condition, seconds=300):
    """Ask a page again and again until the JavaScript ``condition`` is true.

    wait_for_function asks inside the page, where the page's security policy forbids eval.
    """
    end = time.monotonic() + seconds
    while not tab.evaluate(condition):
        assert time.monotonic() < end, f"not true after {seconds} s: {condition}"
        tab.wait_for_timeout(50)


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


@pytest.fixture
def open_tab(browser):
    """A new tab, closed at the end; on a loaded machine a page may take minutes."""
    tabs = []

    def new(**options):
        tabs.append(browser.new_page(**options))
        tabs[-1].set_default_timeout(300_000)  # milliseconds
        return tabs[-1]

    yield new
    for tab in tabs:
        tab.close()
