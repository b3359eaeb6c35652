"""docs/families.md names every family with the checks that it passes."""

import pytest
from scripts.pages import families_page

from l2r.hf.swap.families import FAMILIES, REFUSED
from tests.hf.families import OWN_SIZES
from tests.hf.family_check import COLUMNS, FamilyResult, check_families


def test_the_page_has_a_row_of_every_family_and_the_reason_of_every_refusal():
    text = families_page.PAGE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows[2:]] == list(OWN_SIZES) and rows[0] == list(COLUMNS)
    assert set(FAMILIES) <= set(OWN_SIZES)
    assert all(f"- `{name}`: " in text for name in REFUSED)


def test_a_check_that_failed_is_a_no_on_the_page():
    checks = dict.fromkeys(COLUMNS[1:], True)
    text = families_page.page([FamilyResult("olmoe", **{**checks, "compile": False})])
    assert "| olmoe | yes | yes | yes | yes | yes | no |" in text


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="family must be one of olmoe"):
        next(check_families(["gpt2"]))
