"""README and docs/evidence.md: every number of a result is what results/ come to, rounded once."""

import json
import re
from functools import cache

import numpy as np
import pytest
from scipy import stats

from scripts.pages import evidence_numbers as numbers
from scripts.pages import gap_by_tokens
from scripts.pages.marks import section_of

# What a page says beside its results: sizes, settings, lengths and levels.
SETTINGS = (
    r"16, 64, 256 and 1,024(?: experts)?", r"(?:256 and 1,024|16 and 64) experts",
    r"step 0|side of 0",
    r"[\d,]+(?: to \d+)? experts",
    r"[Ww]ith 16 and 64|[Ww]ith 64 and 256|with 16\b|With 256\b",
    r"(?:After|after) [\d.]+M tokens", r"1\.02M tokens|3\.28M|[Aa]fter 4\.1M", r"24 seeds|16 seeds",
    r"rank \d+", r"fp32|bf16|int8|1e-4", r"95%", r"0\.05 by",
    r"4 to 6 layers, width 128 or 256, 1\.0 to 4\.1M tokens", r"10B",
    r"scale of logits, at 4", r"0\.1 of its rms", r"Predicted was \+0\.010 to \+0\.020",
    r"less than 0\.001 nats",
    r'"10, L2R 5"|"those of 16"',
    r"the 13% of flips", r"3\.28M tokens", r"0\.16% of FLOPs",
    r"within 0\.02",
)  # fmt: skip
SECTIONS = {"README.md": "## Does it help?", "evidence.md": "# Evidence"}


def plain(text):
    """Text without code, links' targets, images and breaks of lines."""
    text = re.sub(r"<!-- L2R by experts -->.*?<!-- end of L2R by experts -->", "", text, flags=re.S)
    text = re.sub(r"```.*?```|!\[.*?\]\(.*?\)", "", text, flags=re.S)
    return " ".join(re.sub(r"\]\(.*?\)", "]", text, flags=re.S).split())


def page(name):
    path = {"README.md": numbers.README, "evidence.md": numbers.EVIDENCE}[name]
    text = path.read_text(encoding="utf-8")
    start = text.index(SECTIONS[name])
    return plain(text[start:].partition("\n## ")[0] if name == "README.md" else text[start:])


@cache
def claimed():
    return [(name, claim.says()) for name, claim in numbers.claims()]


def missing(name, text):
    return [says for where, says in claimed() if where == name and says not in text]


def unaccounted(name, text):
    """Numbers of a page that are in no claim and no setting."""
    for where, says in claimed():
        text = text.replace(says, " ") if where == name else text
    for pattern in (r"`[^`]*`", *SETTINGS):
        text = re.sub(pattern, " ", text)
    return [
        text[max(0, m.start() - 30) : m.end() + 20] for m in re.finditer(r"(?<![A-Za-z])\d", text)
    ]


@pytest.mark.parametrize("name", SECTIONS)
def test_every_claim_stands_on_its_page_and_every_number_is_in_one(name):
    text = page(name)
    assert missing(name, text) == [] and unaccounted(name, text) == []


def test_the_table_is_what_the_results_come_to():
    text = numbers.EVIDENCE.read_text(encoding="utf-8")
    assert section_of(text, numbers.SECTION) == numbers.table()


@pytest.mark.parametrize("name", SECTIONS)
def test_a_digit_that_changes_is_noticed(name):
    """Every digit of every claim, one at a time."""
    text = page(name)
    for where, says in claimed():
        if where != name:
            continue
        for found in re.finditer(r"\d", says):
            at = text.index(says) + found.start()
            other = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
            assert missing(name, other) or unaccounted(name, other), says


def test_numbers_of_old_results_are_replaced_where_a_claim_has_them():
    """Signs, breaks of lines and words around them stay; a claim of other words is not touched."""
    claim = numbers.Claim("it is {:+.3f} [{:.2f}, {:.2f}] after {:.0f} seeds", (-0.0456, 1, 2, 6))
    old = "Old: it is\n+0.050 [0.02, 0.08] after 4 seeds. It is 0.050 after 4 seeds."
    new = "Old: it is\n-0.046 [1.00, 2.00] after 6 seeds. It is 0.050 after 4 seeds."
    assert claim.written_into(old) == new == claim.written_into(new)
    with pytest.raises(ValueError, match="stand on the page twice: it is"):
        claim.written_into(old + old)


def values(study, arm, metric="validation_ce"):
    path = numbers.STORED / study / "results.jsonl"
    found = [r for r in map(json.loads, path.read_text().splitlines()) if r.get("arm") == arm]
    return np.array([r["trained"][metric] for r in sorted(found, key=lambda r: r["seed"])])


def test_an_interval_and_a_pool_are_computed_independently():
    gap = values("tokens-256", "l2r-4m") - values("tokens-256", "linear-4m")
    low, high = stats.t.interval(0.95, len(gap) - 1, gap.mean(), stats.sem(gap))
    assert numbers.ends(numbers.tokens_256("4m")) == pytest.approx((gap.mean(), low, high))
    studies = ("decision", "width-256", "experts-64", "experts-64-width-256")
    pool = [values(study, "l2r-best") - values(study, "linear-best") for study in studies]
    assert numbers.tuned_pool() == pytest.approx(np.concatenate(pool)) and sum(map(len, pool)) == 24


def test_the_picture_has_every_study_of_the_table_with_its_interval():
    chart = gap_by_tokens.figure()
    points = [trace for trace in chart.data if trace.mode == "markers"]
    drawn = {point.text[0] for point in points}
    assert drawn >= {row.study for row in numbers.ROWS}
    (long,) = (point for point in points if point.x[0] > 4)
    mean, low, high = numbers.ends(numbers.tokens_256("4m"))
    assert (long.y[0], long.error_y.array[0]) == pytest.approx((mean, (high - low) / 2))
    lines = [trace for trace in chart.data if trace.mode == "lines"]
    assert [line.name.partition(" ")[0] for line in lines] == ["16", "64", "256", "1,024"]
    tokens, gap = gap_by_tokens.line(gap_by_tokens.LONG)
    assert len(tokens) == len(gap) == 16 and tokens[-1] < 4.096


def test_what_a_rank_needs_is_counted_from_its_reference():
    assert numbers.needed({8: 5.03, 16: 5.01, 64: 5.0}, 5.0) == 16
    assert numbers.needed({8: 5.03, 16: 5.01, 64: 5.0}, 5.02) == 8
