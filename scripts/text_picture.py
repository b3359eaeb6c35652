"""A picture of a text page, as docs/images/text-view.png is: one token and one expert chosen.

    python scripts/text_picture.py diagnosis/index-text.html docs/images/text-view.png --token 40

Needs l2r-moe[browser] and Chromium or Chrome on the PATH.
"""

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright


def take(page: Path, out: Path, *, layer: int, token: int, theme: str) -> None:
    """Go to the layer, then to the token, and choose its first expert."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        raise SystemExit(f"error: none of {', '.join(names)} is on the PATH")
    with sync_playwright() as driver:
        tab = driver.chromium.launch(executable_path=browser).new_page(
            viewport={"width": 1240, "height": 760}, color_scheme=theme
        )
        tab.goto(page.resolve().as_uri())
        for _ in range(layer - 1):
            tab.locator("#layer").press("ArrowRight")
        chosen = tab.locator(".pane").first.locator(".t").nth(token)
        chosen.click()
        chosen.press("Enter")
        tab.screenshot(path=out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layer", type=int, default=1, help="counted from 1")
    parser.add_argument("--token", type=int, default=0, help="counted from 0 over the text shown")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    options = parser.parse_args()
    take(options.page, options.out, layer=options.layer, token=options.token, theme=options.theme)
