"""The table of a reader's own text on the terminal."""

import pytest

from l2r.report.own_text import own_text_table
from tests.report.texts import random_text


def tokens_of(length, written=None):
    routing = random_text(layers=2, rows=1, length=length, columns=length)
    pieces = [str(piece) for piece in routing.pieces[routing.tokens[0]]]
    return pieces, own_text_table(routing, "tiny", written)


def test_a_long_text_begins_at_its_first_token_and_says_where_it_ends():
    pieces, table = tokens_of(30)
    assert [row[0] for row in table.rows] == pieces[:24]
    assert table.caption == "First experts. Tokens 1 to 24 of 30; all: --json, the page."
    assert tokens_of(24)[1].caption == "First experts."


@pytest.mark.parametrize(
    ("length", "written", "start"),
    [(90, 40, 36), (90, 2, 0), (90, 80, 66), (20, 12, 0)],
    ids=["middle", "short prompt", "short answer", "all fit"],
)
def test_what_a_model_wrote_is_shown_behind_a_mark(length, written, start):
    pieces, table = tokens_of(length, written)
    shown = pieces[start : start + 24]
    shown[written - start] = "▸" + shown[written - start]
    assert [row[0] for row in table.rows] == shown
    assert "Text behind ▸ was written by the model." in table.caption
    assert table.verdict.endswith(f"It wrote: {''.join(pieces[written:])}")
