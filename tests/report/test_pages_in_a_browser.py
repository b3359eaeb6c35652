"""Every page in a browser: light, dark and on a phone, without errors and nothing too wide."""

import os
from pathlib import Path

import pytest

from tests.report.conftest import wait_until
from tests.report.pages import every_page

PAGES = (
    "report", "text", "diagnosis", "check", "mismatch", "patches", "study", "sweep", "explorer",
)  # fmt: skip
FORMS = {"light": ("light", 1280), "dark": ("dark", 1280), "phone": ("dark", 420)}
SHOTS = os.environ.get("L2R_SCREENSHOTS")  # a folder for pictures of all, to look at


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    found = every_page(tmp_path_factory.mktemp("pages"))
    assert set(found) == set(PAGES)
    return found


DRAWN = "[...document.querySelectorAll('.js-plotly-plot')].every(d => d.layout)"
MARKS = """[...new Set([...document.querySelectorAll('.xtick text, .ytick text, .legendtext')]
  .map(mark => getComputedStyle(mark).fill).filter(Boolean))]"""
LUMINANCE = """color => {
  const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
  const [x, y, z] = [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return a ? 0.2126 * x + 0.7152 * y + 0.0722 * z : -1;
}"""

IS_DARK = f"""(({LUMINANCE})(getComputedStyle(document.body).backgroundColor) <
  ({LUMINANCE})(getComputedStyle(document.body).color))"""
LEAST_CONTRAST = f"""(inks => {{
  const back = ({LUMINANCE})(getComputedStyle(document.body).backgroundColor);
  return Math.min(...inks.map({LUMINANCE}).map(v =>
    (Math.max(v, back) + 0.05) / (Math.min(v, back) + 0.05)));
}})"""
TEXT = f"[getComputedStyle(document.body).color, ...{MARKS}]"
ERROR_BARS = """[...document.querySelectorAll('path.xerror, path.yerror')]
  .map(mark => getComputedStyle(mark).stroke)"""


@pytest.mark.slow("a browser")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_in_three_forms(name, open_tab, pages):
    tab, errors = open_tab(viewport={"width": 1280, "height": 900}), []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    tab.on("console", lambda said: errors.append(said.text) if "WARN" in said.text else None)
    tab.emulate_media(color_scheme="light")
    tab.goto(pages[name].as_uri())
    for form, (scheme, width) in FORMS.items():
        tab.emulate_media(color_scheme=scheme)
        tab.set_viewport_size({"width": width, "height": 900})
        wait_until(tab, DRAWN)
        wait_until(tab, f"{IS_DARK} === {'true' if scheme == 'dark' else 'false'}")
        # Figures follow the theme and the width in their own time.
        wait_until(tab, f"{LEAST_CONTRAST}({TEXT}) >= 7")
        assert tab.evaluate(f"{LEAST_CONTRAST}({ERROR_BARS})") >= 3  # WCAG's for graphics
        wait_until(tab, f"document.documentElement.scrollWidth <= {width}")
        if SHOTS:
            tab.wait_for_timeout(300)
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            tab.screenshot(path=f"{SHOTS}/{name}-{form}.png", full_page=True)
    assert errors == []


@pytest.mark.slow("a browser")
@pytest.mark.parametrize("name", ["text", "diagnosis", "check", "mismatch"])
def test_a_button_switches_the_theme(name, open_tab, pages):
    tab = open_tab()
    tab.emulate_media(color_scheme="light")
    tab.goto(pages[name].as_uri())
    tab.locator("#theme").click()
    assert tab.evaluate(IS_DARK) and tab.locator("#theme").inner_text() == "Light theme"
    tab.locator("#theme").click()
    assert not tab.evaluate(IS_DARK)


@pytest.mark.slow("a browser")
def test_a_figure_of_a_folded_part_has_the_width_of_the_page_when_it_is_opened(open_tab, pages):
    tab = open_tab(viewport={"width": 1280, "height": 900})
    tab.goto(pages["diagnosis"].as_uri())
    part = tab.locator("details", has=tab.get_by_role("heading", name="Robustness")).first
    drawn = part.locator(".js-plotly-plot .main-svg").first
    part.locator("summary").click()
    wait_until(tab, "[...document.querySelectorAll('details[open] .main-svg')].every("
                    "s => s.getBoundingClientRect().width > 500)")  # fmt: skip
    assert drawn.is_visible()


@pytest.mark.slow("a browser")
def test_the_first_screen_of_the_diagnosis_has_the_sentence_the_text_and_its_limits(
    open_tab, pages
):
    tab = open_tab(viewport={"width": 1280, "height": 800})
    tab.goto(pages["diagnosis"].as_uri())
    tops = [
        tab.locator(part).first.bounding_box()["y"]
        for part in (".verdict", ".passages", ".cannot", "table")
    ]
    assert tops == sorted(tops) and tops[2] < 800
    assert tab.locator("details[open]").count() == 0


@pytest.mark.slow("a browser")
def test_the_explorer_waits_for_room(open_tab, pages):
    """A browser may lay a page out before its window has a size."""
    tab, errors = open_tab(viewport={"width": 20, "height": 20}), []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(pages["explorer"].as_uri())
    wait_until(tab, DRAWN)
    assert errors == []
    tab.set_viewport_size({"width": 420, "height": 900})
    wait_until(tab, "document.getElementById('landscape').width > 150")
    assert errors == []


@pytest.mark.slow("a page of every kind")
def test_a_page_says_its_verdict_first_and_what_it_cannot_say(pages):
    for name in set(PAGES) - {"text", "mismatch", "explorer"}:  # drawn by a script
        text = pages[name].read_text()
        assert text.index("<h1>") < text.index("class='verdict'") < text.index("<h2"), name
        assert "What this cannot say." in text, name
