"""Every page has a policy under which nothing runs but its own scripts."""

import base64
import hashlib
import re

import pytest

from l2r.analysis.diagnostics.checks import Finding
from l2r.report.check import write_check
from l2r.report.mismatch import write_mismatch
from l2r.report.page import Section, write_page
from l2r.report.text_view import write_text_page
from l2r_lab.report.explorer import write_explorer
from tests.files.test_mismatch import small
from tests.report.pages import every_page
from tests.report.texts import random_text

EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
# What a place that escapes nothing would let in, in the middle of a page.
INJECTED = (
    "<script>window.evil = 1</script><img src='none.png' onerror='window.evil = 1'>"
    "<svg onload='window.evil = 1'></svg>"
    "<iframe srcdoc='<script>parent.evil = 1</script>'></iframe>"
    "<a id='go' href='javascript:window.evil = 1'>go</a><base href='http://127.0.0.1:9/'>"
    "<script src='data:text/javascript,window.evil = 1'></script>"
    "<script type='module'>window.evil = 1</script>"
)


def all_pages(folder):
    found = every_page(folder)
    found["mismatch"] = write_mismatch(folder / "m.html", small(), name=EVIL, against="bf16")
    return found


def figure():
    graph = pytest.importorskip("plotly.graph_objects")
    return graph.Figure(graph.Scatter(x=[1], y=[2], name=EVIL), {"title": EVIL})


def check_policy(text):
    (content,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', text)
    rules = dict(rule.split(" ", 1) for rule in content.split("; "))
    assert rules.pop("default-src") == "'none'" and rules.pop("base-uri") == "'none'"
    assert rules.pop("form-action") == "'none'" and rules.pop("img-src") == "data: blob:"
    assert rules.pop("style-src") == "'unsafe-inline'"  # plotly writes style attributes
    scripts = re.findall(r"<script\b(?![^>]*json)[^>]*>(.*?)</script>", text, re.DOTALL)
    assert "Content-Security-Policy" in text[: text.index("<script")] if scripts else True
    sums = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = set(rules.pop("script-src").split())
    assert allowed >= {f"'sha256-{digest}'" for digest in sums} and not rules
    assert not any("unsafe" in source or "http" in source for source in allowed)
    return allowed, sums


def test_a_policy_allows_the_scripts_of_a_page_and_no_other(tmp_path):
    sections = [Section(EVIL, EVIL, [figure(), figure()])]
    plain = write_page(
        tmp_path / "a.html", title=EVIL, summary=EVIL, sections=[Section(EVIL, EVIL)]
    )
    allowed, sums = check_policy(plain.read_text())
    assert len(allowed) == len(sums) == 1  # the switch of the theme
    page = write_page(tmp_path / "b.html", title=EVIL, summary=EVIL, sections=sections)
    allowed, sums = check_policy(page.read_text())
    # Plotly's script once, and two for each figure or one: none of them is the title's.
    assert len(allowed) == len(set(sums)) and "window.evil" not in "".join(
        s for s in re.findall(r"<script[^>]*>\s*window.evil", page.read_text())
    )
    for page in (
        write_text_page({EVIL: random_text()}, tmp_path / "c.html"),
        write_mismatch(tmp_path / "d.html", small(), name=EVIL, against=EVIL),
        write_check(tmp_path / "f.html", EVIL, [Finding("fault", EVIL, EVIL, check=EVIL)]),
    ):
        allowed, sums = check_policy(page.read_text())
        assert len(allowed) == len(sums) == 1
    sets = [{"name": EVIL, "anchors": [[[1.0, 0.0]]], "settings": {}}]
    page = write_explorer(tmp_path / "e.html", sets, title=EVIL, reach=1.0, figures=sections)
    allowed, sums = check_policy(page.read_text())
    assert len(allowed) == len(set(sums)) > 2


@pytest.mark.slow("a browser")
def test_what_is_injected_into_a_page_does_not_run(open_tab, tmp_path):
    """In every page, in which all that is its own works: test_pages_in_a_browser.py."""
    for name, path in all_pages(tmp_path).items():
        text = path.read_text()
        check_policy(text)
        for place, hurt in (
            ("body", text.replace("</body>", f"{INJECTED}</body>")),
            ("first", re.sub(r"<body[^>]*>", lambda body: body[0] + INJECTED, text, count=1)),
        ):
            path.write_text(hurt)
            tab, asked, refused = open_tab(), [], []
            tab.on("requestfinished", lambda request, asked=asked: asked.append(request.url))
            tab.on("console", lambda said, refused=refused: refused.append(said.text))
            tab.goto(path.as_uri())
            tab.locator("#go").evaluate("link => link.click()")
            tab.wait_for_timeout(300)
            assert tab.evaluate("window.evil") is None, (name, place)
            assert asked == [path.as_uri()], (name, place)
            assert any("Content Security Policy" in line for line in refused), (name, place)
        # Without the policy it does run, so that the test would notice.
        open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", hurt)
        path.write_text(open_page)
        tab = open_tab()
        tab.goto(path.as_uri())
        assert tab.evaluate("window.evil") == 1, name
