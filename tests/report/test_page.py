"""What a page does with text and with numbers in narrow columns."""

from l2r.report.page import Section, write_page
from l2r.report.tables import Table


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
    assert page.count("class='number'") == 4
