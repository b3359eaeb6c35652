"""The page of routes that differ, in a browser."""

import numpy as np
import pytest

from l2r.report import mismatch
from l2r.report.mismatch import cost, limits, reference, tables, verdict, write_mismatch
from tests.files.test_mismatch import small


@pytest.fixture
def page(open_tab, tmp_path):
    """The page, which must not have logged an error at the end."""
    path = write_mismatch(tmp_path / "page.html", small(), name="a<b", against="bf16")
    tab = open_tab(color_scheme="dark", viewport={"width": 420, "height": 800})
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text))
    tab.goto(path.as_uri())
    yield tab
    assert errors == []


def marked(page):
    """How many layers each token is marked for."""
    return page.locator("#text .t").evaluate_all(
        "tokens => tokens.map(t => Number((/f(\\d)/.exec(t.className) ?? [0, 0])[1]))"
    )


@pytest.mark.slow("a browser")
def test_verdict_and_limits_stand_at_the_head(page):
    assert page.locator("#verdict").inner_text() == verdict(small(), "bf16")
    assert page.locator("#limits").inner_text() == limits(small())
    assert "a<b against bf16" in page.locator("h1").inner_text()
    assert page.locator("html").get_attribute("data-theme") == "dark"


@pytest.mark.slow("a browser")
def test_tokens_are_marked_by_the_layers_that_differ(page):
    changed = small().changed
    assert marked(page) == changed.sum(axis=0).tolist() == [0, 2, 0, 0, 1]
    page.locator("#layer").select_option(label="layer 0")
    assert marked(page) == changed[0].tolist()


@pytest.mark.slow("a browser")
def test_the_next_flip_shows_both_sides_experts(page):
    page.locator("#next").click()
    assert page.locator(".t.current").inner_text() == "12"
    rows = page.locator("#token tr").all_inner_texts()
    assert rows[1].split("\t")[:3] == ["0", "0 1", "0 2"]
    assert rows[2].split("\t")[:3] == ["2", "0 1", "2 3"]
    assert page.locator("#token tr.changed").count() == 2
    page.keyboard.press("ArrowLeft")
    assert page.locator(".t.current").inner_text() == " word"


@pytest.mark.slow("a browser")
def test_bars_are_the_shares_and_nothing_is_wider_than_a_phone(page):
    first = page.locator("#first tr").first.inner_text()
    assert "20.0%" in first and "80.0% certified" in first
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


@pytest.mark.slow("a browser")
def test_the_text_stands_before_what_is_folded_and_is_shown_whole_on_demand(page):
    assert page.locator("#charts").is_hidden() and page.locator("#first").is_visible()
    assert "3.1% to 3.6% linear" in page.locator("#reference").inner_text()
    assert page.locator("#text").evaluate("t => getComputedStyle(t).overflowY") == "auto"
    page.locator("#whole").click()
    assert page.locator("#text").evaluate("t => getComputedStyle(t).overflowY") == "visible"
    page.locator("summary").click()
    assert cost(small()) in page.locator("#charts").inner_text()


def test_the_verdict_is_short_and_a_reference_is_of_bf16_alone():
    assert verdict(small(), "bf16") == (
        "40.0% of 5 tokens take other experts with bf16 in at least one of 2 layers; 80.0% of all "
        "choices stay. The loss rises by 0.060 nats."
    )
    none = np.zeros(5)
    assert verdict(small(own=none, replayed=none), "bf16").endswith(
        "The loss changes by less than 0.001 nats."
    )
    assert reference("int8") == "" and "no limit" in reference("bf16")
    assert [len(table.columns) for table in tables(small())] == [6, 3, 3]


def test_one_choice_that_changed_among_thousands_is_not_all_kept():
    flat = ("lengths", "domain", "tokens", "own", "replayed", "kl_own", "kl_replayed")
    values = {name: np.tile(getattr(small(), name), 400) for name in flat}
    values |= {n: np.tile(getattr(small(), n), (1, 400)) for n in ("gap", "moved", "certified")}
    many = np.tile(small().experts, (1, 400, 1))
    other = many.copy()
    other[0, 7] = [0, 2]
    result = small(**values, experts=many, other_experts=other)
    assert "0.05% of 2,000 tokens" in verdict(result, "bf16")
    assert "99.99% of all choices stay" in verdict(result, "bf16")
    assert "100.0% of all choices stay" in verdict(small(other_experts=small().experts), "bf16")


def test_no_share_between_none_and_all_is_rounded_to_either():
    shown = {0.0: "0.00%", 1e-6: "<0.01%", 0.00011: "0.01%", 0.5: "50.0%", 0.9995: "99.95%"}
    shown |= {0.99994: "99.99%", 0.999999: ">99.99%", 1.0: "100.0%"}
    assert {share: mismatch._percent(share) for share in shown} == shown


def test_a_page_without_routes_says_so():
    nothing = small(other_experts=np.full_like(small().experts, -1))
    assert "nothing was compared" in verdict(nothing, "bf16")
