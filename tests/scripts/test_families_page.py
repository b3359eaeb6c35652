"""docs/swap.md names every family with the checks that it passes."""

import re

import pytest
from scripts.pages import families_page

from l2r.hf.swap.families import FAMILIES, REFUSED
from tests.hf.families import OWN_SIZES
from tests.hf.family_check import COLUMNS, FamilyResult, check_families


def test_the_page_names_every_family_and_the_reason_of_every_refusal():
    text = families_page.PAGE.read_text(encoding="utf-8")
    supported = text.split("### Supported")[1].split("### Refused")[0]
    assert re.findall(r"`(\w+)`", supported) == list(OWN_SIZES)
    assert f"All {len(OWN_SIZES)} families" in text and "| no |" not in text
    assert set(FAMILIES) <= set(OWN_SIZES)
    assert all(f"- `{name}`: " in text for name in REFUSED)


def test_a_check_that_failed_is_a_no_on_the_page():
    checks = dict.fromkeys(COLUMNS[1:], True)
    failed = FamilyResult("olmoe", **{**checks, "compile": False})
    text = families_page.section([failed, FamilyResult("mixtral", **checks)])
    assert "| olmoe | yes | yes | yes | yes | yes | no |" in text
    assert "1 of 2 families pass" in text and "| mixtral |" not in text


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="family must be one of olmoe"):
        next(check_families(["gpt2"]))
