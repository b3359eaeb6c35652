"""What a page does with text and with numbers in narrow columns."""

from l2r.report.page import Passages, Section, write_page
from l2r.report.passages import first_passages
from l2r.report.tables import Table
from l2r.report.verdicts import Verdict
from tests.report.texts import random_text


def test_names_in_backticks_are_code_and_markup_stays_text(tmp_path):
    path = write_page(
        tmp_path / "page.html",
        title="`title`",
        summary="as in `decision`, a<b",
        sections=[Section("one", "see `x & y`; a lone ` stays")],
    )
    page = path.read_text()
    assert "as in <code>decision</code>, a&lt;b" in page
    assert "see <code>x &amp; y</code>; a lone ` stays" in page


def test_a_number_is_one_word_and_an_interval_can_be_broken():
    cells = ("2.9e-06", "-0.5", 61000, 0.25, "+0.01 [-0.02, +0.04]", "l2r_sips-h1", "-", None)
    page = Table("", tuple("abcdefgh"), (cells,)).to_html()
    for number in ("2.9e-06", "-0.5", "61,000", "0.2500"):
        assert f"<td class='number'>{number}</td>" in page
    assert "<td class='name'>l2r_sips-h1</td>" in page  # not broken at its hyphen
    assert page.count("class='number'") == 4


def test_a_lead_stands_between_the_verdict_and_what_it_cannot_say(tmp_path):
    lead = [Passages({"one": [("a<b", "#40809f", "expert 0"), (" plain", "", "")]})]
    page = write_page(
        tmp_path / "page.html", title="t", summary="about", verdict=Verdict("It is 3.", "Why."),
        lead=lead, sections=[Section("open"), Section("closed", "inside", folded=True)],
    ).read_text()  # fmt: skip
    parts = ["It is 3.", "a&lt;b", " plain", "Why.", "about", "open</h2>", "<details>", "inside"]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert "title='expert 0'>a&lt;b</span>" in page and "<span> plain" not in page
    assert "<nav>" not in page  # one section is open
    for first in ("It is 3.", "closed</h2></summary>"):
        assert first in page


def test_passages_color_the_first_words_by_expert_and_others_by_their_partners():
    one, two = random_text(), random_text(seed=1)
    columns = first_passages({"one": one, "again": one, "two": two, "fourth": one}).columns
    assert len(columns) == 3
    titles = list(columns)
    assert titles[0] == "one, layer 1"
    assert titles[1].startswith("again, layer 1: 100% as one, ")
    assert titles[1].endswith("% by chance")
    pieces, colors, notes = zip(*columns["one, layer 1"], strict=True)
    plain = [piece for piece, color in zip(pieces, colors, strict=True) if not color]
    assert set(plain) == {"\n"} and len(set(colors)) > 2  # between two passages
    assert all(note.startswith("expert ") for note in notes if note)
    assert len("".join(pieces)) < 400
    assert [color for _, color, _ in columns[titles[1]]] == list(colors)


def test_passages_of_models_of_other_sizes_have_one_color_for_partners_in_the_layers_shown():
    """A model of twice the layers and experts, whose middle layer chooses as the first one's."""
    one, wide = random_text(), random_text(layers=4, experts=12, seed=1)
    wide.experts[2] = one.experts[1]
    columns = first_passages({"one": one, "wide": wide}).columns
    (_, first), (title, second) = columns.items()
    assert title.startswith("wide, layer 2: 100% as one, ")
    assert [color for _, color, _ in first] == [color for _, color, _ in second]


def test_a_column_of_sentences_is_read_from_the_left():
    rows = (("a", 0.5, "the unit is that of the scoring, of which there are many"), ("b", 1, "-"))
    page = Table("", ("name", "value", "what it says"), rows).to_html()
    assert page.count("class='words'") == 3 and "<th class='words'>what it says" in page
    assert "<td class='number'>0.5000" in page
