"""The text page in a browser, with real clicks and keys."""

import dataclasses

import numpy as np
import pytest

from l2r.report.text_findings import colors_beside
from l2r.report.text_view import write_text_page
from tests.report.conftest import wait_until
from tests.report.texts import WORDS, random_text

pytestmark = pytest.mark.slow("a browser")

LONG = {"length": 120, "columns": 120}  # too long to be shown once per layer
ONE, TWO = random_text(**LONG), random_text(layers=3, experts=9, seed=1, **LONG)
OTHER = random_text(pieces=WORDS[::-1], seed=2, **LONG)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    return write_text_page({"one": ONE, "other": OTHER, "two": TWO}, folder / "page.html")


@pytest.fixture
def page(open_tab, path):
    """The page, which must not have logged an error at the end."""
    tab = open_tab(color_scheme="dark", viewport={"width": 1300, "height": 800})
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text))
    tab.goto(path.as_uri())
    # Passages are rendered when they are near, and have no text before.
    wait_until(tab, "document.querySelector('.passage')?.innerText")
    yield tab
    assert errors == []


def token(page, number, pane=0):
    return page.locator(".pane").nth(pane).locator(".t").nth(number)


def firsts(page, pane=0):
    """First expert of every token, in the layer of the slider."""
    tokens = page.locator(".pane").nth(pane).locator(".t")
    return [int(e) for e in tokens.evaluate_all("tokens => tokens.map(t => t.dataset.e)")]


def colors(page, layer, pane=0):
    """Number of every token's color, of a text that is shown once per layer."""
    tokens = page.locator(".pane").nth(pane).locator(f".passage >> nth={layer}").locator(".t")
    name = "t => [...t.classList].find(c => /^e\\d+$/.test(c)).slice(1)"
    return [int(color) for color in tokens.evaluate_all(f"tokens => tokens.map({name})")]


def rows_of(page, pane=0):
    """Experts and weights beside the text."""
    table = page.locator("#token table").nth(pane).locator("tr")
    return [
        (int(row.locator("button").inner_text()), float(row.locator(".weight").inner_text()))
        for row in table.all()
    ]


def expected_rows(text, layer, number):
    experts = text.experts[layer].reshape(-1, text.experts.shape[-1])[number].tolist()
    weights = text.weights[layer].reshape(-1, text.weights.shape[-1])[number].tolist()
    # Weights are kept to 1 / 65535 of the layer's largest, which is below 1, and shown to 1e-4.
    return [(e, pytest.approx(w, abs=1e-4)) for e, w in zip(experts, weights, strict=True)]


def first_of(text, layer):
    return text.experts[layer, ..., 0].ravel().tolist()


def test_tokens_have_their_experts_colors_and_the_slider_moves_through_layers(page):
    text = page.locator(".passage").first.inner_text()
    assert text == "".join(WORDS[ONE.tokens[0]])
    assert (firsts(page), firsts(page, 1)) == (first_of(ONE, 0), first_of(TWO, 0))
    page.locator("#layer").focus()
    page.keyboard.press("ArrowRight")
    assert (firsts(page), firsts(page, 1)) == (first_of(ONE, 1), first_of(TWO, 1))
    assert page.locator("#layer-number").inner_text() == "1 (2 of 3)"  # of block 1
    page.keyboard.press("End")  # the first checkpoint has no third layer and stays at its last
    assert (firsts(page), firsts(page, 1)) == (first_of(ONE, 1), first_of(TWO, 2))
    assert page.locator("#layer-number").inner_text() == "2 (3 of 3)"  # as the deeper model says


def test_a_sentence_is_shown_once_per_layer_in_matched_colors(open_tab, tmp_path):
    size = {"rows": 1, "length": 12, "columns": 12}
    text = random_text(layers=3, **size)
    renumber = np.array([3, 0, 5, 1, 4, 2])
    other = dataclasses.replace(text, experts=renumber[text.experts].astype(np.int16))
    tab = open_tab()
    written = {"text": 8, "other": 8}
    page = write_text_page({"text": text, "other": other}, tmp_path / "page.html", written=written)
    tab.goto(page.as_uri())
    for layer in range(3):
        first = first_of(text, layer)
        assert colors(tab, layer) == first
        assert colors(tab, layer, pane=1) == first  # renumbered, in the colors of its partners
        assert f"Layer {layer} " in tab.locator(".finding").nth(layer).inner_text()
    assert (
        "other sends 100% of the tokens to the experts that match text's"
        in tab.locator("#headline").inner_text()
    )
    assert tab.locator("#layer").is_hidden()
    assert tab.locator(".passage b").count() == 6  # where the models began to write
    token(tab, 12 + 4).click()  # of the second layer
    number = int(renumber[text.experts[1, 0, 4, 0]])
    assert rows_of(tab, 1)[0][0] == number
    tab.keyboard.press("+")
    assert rows_of(tab) == expected_rows(text, 2, 4)
    tab.keyboard.press("Enter")
    assert tab.locator(".passage").nth(2).locator(".t.first").count() == (
        first_of(text, 2).count(first_of(text, 2)[4])
    )


def test_experts_without_a_partner_have_a_key_of_their_own(page):
    page.locator("#right").select_option("2")
    experts = ONE.contexts.shape[1]
    without = [e for e, c in enumerate(colors_beside(ONE, TWO, 0).tolist()) if c >= experts]
    key = page.locator(".key").nth(1)
    shown = [b for b in key.locator("button").all() if b.is_visible()]
    assert [int(button.inner_text()) for button in shown] == without
    assert len(without) == 9 - experts
    assert "Only two" in key.inner_text()
    shown[0].click()
    assert page.locator(".pane").nth(1).locator(".t.first").count() == firsts(page, 1).count(
        without[0]
    )
    page.locator("#right").select_option("-1")
    assert page.locator(".key").count() == 1


def test_breaks_of_lines_have_a_sign_and_break_the_line(page):
    for piece, inside, behind in (("a\n\n", "a↵↵", "\n\n"), ("\n  b", "↵\n  b", ""), ("", "∅", "")):
        assert page.evaluate("p => [visible(p), breaksAfter(p)]", piece) == [inside, behind]


def test_pointing_shows_a_tokens_numbers_in_both_checkpoints(page):
    token(page, 25).hover()
    for pane, text in enumerate((ONE, TWO)):
        assert rows_of(page, pane) == expected_rows(text, 0, 25)
        facts = page.locator("#token dd").all_inner_texts()[4 * pane : 4 * pane + 3]
        for shown, name in zip(facts, ("margin", "entropy", "radius"), strict=True):
            value = getattr(text, name)[0].ravel()[25]
            assert float(shown) == pytest.approx(value, rel=5e-4)  # four digits
    page.locator("#token h2").hover()  # away from the text: the token that has the focus again
    assert rows_of(page) == expected_rows(ONE, 0, 0)


def test_weight_bars_of_two_checkpoints_have_one_scale(open_tab, tmp_path):
    faint = random_text(seed=3, **LONG)
    faint = dataclasses.replace(faint, weights=faint.weights / 4)
    tab = open_tab()
    tab.goto(write_text_page({"one": ONE, "faint": faint}, tmp_path / "page.html").as_uri())
    token(tab, 25).hover()
    lengths = tab.locator("#token .bar i").evaluate_all("all => all.map(b => b.style.width)")
    shares = [float(length.removesuffix("%")) / 100 for length in lengths]
    weights = [weight for pane in (0, 1) for _, weight in rows_of(tab, pane)]
    # Of the largest weight that the layers shown have; weights are shown to 1e-4.
    assert shares == [pytest.approx(w / ONE.weights[0].max(), abs=1e-3) for w in weights]


def test_keys_walk_through_the_text_and_choose_experts(page):
    page.locator("#theme").focus()
    while page.evaluate("!document.activeElement.matches('.t')"):
        page.keyboard.press("Tab")
    keys = {"ArrowRight": 1, "ArrowLeft": 0, "End": 119, "Home": 0}
    for key, number in keys.items():
        page.keyboard.press(key)
        assert token(page, number).evaluate("t => t === document.activeElement")
        assert rows_of(page) == expected_rows(ONE, 0, number)
    word = "t => [...t.getClientRects()].at(-1)"  # the space before it may be on the line above
    box = token(page, 0).evaluate(word)
    page.keyboard.press("ArrowDown")
    below = page.locator(".t:focus").evaluate(word)
    assert below["top"] > box["top"] and abs(below["left"] - box["left"]) < 60
    page.keyboard.press("ArrowUp")
    assert token(page, 0).evaluate("t => t === document.activeElement")
    first, second = ONE.experts[0, 0, 0].tolist()
    assert f"expert {first} weight" in token(page, 0).get_attribute("aria-label")
    page.keyboard.press("Enter")
    assert f"Expert {first} of one" in page.locator("#expert").inner_text()
    page.keyboard.press("2")
    assert f"Expert {second} of one" in page.locator("#expert").inner_text()
    page.keyboard.press("+")
    assert firsts(page) == first_of(ONE, 1)
    page.keyboard.press("Escape")
    assert "Choose an expert" in page.locator("#expert").inner_text()


def test_choosing_an_expert_frames_its_tokens_and_shows_what_it_serves(page):
    token(page, 3).click()
    expert = int(ONE.experts[0, 0, 3, 1])
    page.locator("#token table").first.get_by_role("button").nth(1).click()
    chosen = ONE.experts[0].reshape(-1, 2)
    for name, among in (("first", chosen[:, 0] == expert), ("among", chosen[:, 1] == expert)):
        framed = page.locator(".pane").first.locator(f".t.{name}")
        assert framed.count() == among.sum()
        frame = framed.first.evaluate("t => getComputedStyle(t).outline")
        assert "solid" in frame and ("3px" if name == "first" else "1px") in frame
    contexts = page.locator("#expert .contexts li")
    for n, place in enumerate(ONE.contexts[0, expert].tolist()):
        assert contexts.nth(n).locator("mark").inner_text() == WORDS[ONE.tokens.ravel()[place]]
        weight = float(ONE.context_weights[0, expert, n])
        assert float(contexts.nth(n).locator(".note").inner_text()) == pytest.approx(
            weight, abs=6e-4
        )
    piece, hits = ONE.vocabulary[0, expert, 0], ONE.vocabulary_counts[0, expert, 0]
    of = int((ONE.tokens == piece).sum())
    words = page.locator("#expert .vocabulary li").first.inner_text()
    assert WORDS[piece] in words and f"({hits} of {of})" in words
    page.locator(".chooser").nth(1).select_option("5")  # an expert of the other by its number
    assert "Expert 5 of two" in page.locator("#expert").inner_text()


def test_the_switch_shows_other_checkpoints_and_texts(page):
    page.locator("#left").select_option(label="two")
    page.locator("#right").select_option(label="none")
    wait_until(page, "document.querySelectorAll('.pane').length === 1")
    assert firsts(page) == first_of(TWO, 0)
    page.locator("#right").select_option(label="other")  # of another vocabulary
    assert token(page, 0, pane=1).text_content() == WORDS[::-1][OTHER.tokens[0, 0]].lstrip()
    token(page, 4, pane=1).hover()
    wait_until(page, "document.querySelectorAll('#token table').length === 1")
    assert rows_of(page) == expected_rows(OTHER, 0, 4)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_expert_is_readable_and_its_number_is_there_on_demand(page, theme):
    """WCAG's contrast of the text to its color is at least 4.5."""
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"  # as the system's
    if theme == "light":
        page.locator("#theme").click()
    page.locator("#numbers").check()
    mark = "getComputedStyle(document.querySelector('.t'), '::after').content"
    assert page.evaluate(mark) == f'"{first_of(ONE, 0)[0]}"'
    lights = page.evaluate(
        """() => {
      const brush = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
        .getContext("2d", {willReadFrequently: true});
      const light = (color) => {
        brush.fillStyle = color;
        brush.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...brush.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
          .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      return Array.from({length: 9}, (_, e) => {
        const token = document.body.appendChild(document.createElement("span"));
        token.className = `t e${e}`;
        const style = getComputedStyle(token);
        return [light(style.backgroundColor), light(style.color)];
      });
    }"""
    )
    for ground, ink in lights:
        low, high = sorted((ground, ink))
        assert (high + 0.05) / (low + 0.05) >= 4.5
    assert len({ground for ground, _ in lights}) == 9  # test_palette.py has their distances


def test_a_large_page_lays_out_only_what_is_near_the_window(open_tab, tmp_path):
    """16 layers, 64 experts, 4,000 tokens, two checkpoints: opened at once, whatever its length."""
    size = {"layers": 16, "experts": 64, "chosen": 8, "rows": 16, "length": 250, "columns": 250}
    texts = {"one": random_text(**size), "two": random_text(**size, seed=1)}
    tab = open_tab(viewport={"width": 1300, "height": 800})
    tab.goto(write_text_page(texts, tmp_path / "page.html").as_uri())
    assert tab.locator(".t").count() == 8000
    drawn = "token => token.checkVisibility({contentVisibilityAuto: true})"
    wait_until(tab, f"({drawn})(document.querySelector('.t'))")
    assert not tab.locator(".t").last.evaluate(drawn)
