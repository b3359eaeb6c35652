"""The pictures of the docs, from runs of the demo: docs/images, all but router-scale.png.

    l2r compare demo training.steps=200 --routers linear,l2r_sips --out runs/pictures
    PYTHONPATH=. python -m scripts.pages.pictures runs/pictures

Needs l2r-moe[browser] and Chromium or Chrome on the PATH.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import plotly.graph_objects as go
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from scripts.pages import gap_by_tokens, needed_rank, routers_by_experts

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
STUDIES = {  # picture: plan, words of a figure
    "screen-scales": ("screen", "experts ever first"),
    "decision-forest": ("decision", "first better"),
    "decision-training": ("decision", "The same less that of"),
}
OF_SEVERAL: dict[str, tuple[Callable[[], go.Figure], str]] = {  # of several studies: figure, words
    "routers-by-experts": (
        lambda: routers_by_experts.figure(list(routers_by_experts.all_arms())),
        "router parameters over",
    ),
    "gap-by-tokens": (gap_by_tokens.figure, "tokens seen"),
    "needed-rank": (lambda: needed_rank.figure(needed_rank.ranks()), "router parameters of"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def opened(page: Path, width: int, height: int, *, unfolded: bool = False) -> Iterator[Page]:
    """The page in a browser, in its light theme; ``unfolded``: with all its parts open."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"error: none of {', '.join(BROWSERS)} is on the PATH")
    with sync_playwright() as driver:
        tab = driver.chromium.launch(executable_path=browser).new_page(
            viewport={"width": width, "height": height}, color_scheme="light"
        )
        tab.set_default_timeout(240_000)  # plotly is large, and the machine may be busy
        tab.goto(page.resolve().as_uri())
        if unfolded:
            tab.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
        tab.wait_for_timeout(1500)  # figures draw themselves after the page is there
        yield tab


def text_view(page: Path, out: Path, layer: int = 3, token: int = 40) -> None:
    """Layer and token counted from 1 and 0; the token's first expert is chosen."""
    with opened(page, 1240, 760) as tab:
        for _ in range(layer - 1):
            tab.locator("#layer").press("ArrowRight")
        chosen = tab.locator(".pane").first.locator(".t").nth(token)
        chosen.click()
        chosen.press("Enter")
        tab.screenshot(path=out)


def top(page: Path, out: Path, width: int, height: int) -> None:
    """What one sees first."""
    with opened(page, width, height) as tab:
        tab.screenshot(path=out)


def figure(page: Path, out: Path, words: str, width: int = 920) -> None:
    """The first figure with these words in it."""
    with opened(page, width, 900, unfolded=True) as tab:
        tab.locator(".plotly-graph-div").filter(has_text=words).first.screenshot(path=out)


def l2r(*arguments: object) -> None:
    """Run a command."""
    subprocess.run([sys.executable, "-m", "l2r", *map(str, arguments)], check=True)


def studies() -> None:
    """Figures of the studies, from their results as they are kept in git."""
    with tempfile.TemporaryDirectory() as pages:
        for name, (plan, words) in STUDIES.items():
            l2r("evidence", plan, "--judge-only", "--out", pages)
            figure(Path(pages) / plan / "report.html", IMAGES / f"{name}.png", words)
        for name, (make, words) in OF_SEVERAL.items():
            page = Path(pages) / f"{name}.html"
            make().write_html(page)
            figure(page, IMAGES / f"{name}.png", words)


def small(path: Path) -> None:
    """Save a picture again with 255 colors."""
    Image.open(path).convert("RGB").quantize(255).save(path, optimize=True)


def main() -> None:
    """Take all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder with the runs linear and l2r_sips")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder)
        l2r("diagnose", runs / "linear", runs / "l2r_sips", "--out", pages)
        l2r("landscape", "--out", pages / "landscape.html")
        text_view(pages / "index-text.html", IMAGES / "text-view.png")
        top(runs / "report.html", IMAGES / "demo-report.png", 1280, 1500)
        figure(pages / "index.html", IMAGES / "routing-plane.png", "Routing plane")
        figure(pages / "landscape.html", IMAGES / "landscape.png", "")
        top(pages / "landscape.html", IMAGES / "explorer.png", 1360, 1060)
    studies()
    for name in (
        "text-view",
        "demo-report",
        "routing-plane",
        "landscape",
        "explorer",
        *STUDIES,
        *OF_SEVERAL,
    ):
        small(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
