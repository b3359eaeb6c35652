"""Changes made by hand: what finds them, what is stale, and their part of the page."""

import json

import pytest
import yaml

from scripts.proofs import by_hand
from scripts.proofs.mutant_trees import Outcome

ENTRY = {
    "n": 1, "draw": 1, "at_first": "none", "room": "stats", "file": "l2r/a.py",
    "under": "one + two",
    "old": "1 + 1", "new": "1 - 1", "tests": ["tests/near", "tests/far"],
}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A checkout with one source file, whose change is listed."""
    source = tmp_path / "src" / "l2r" / "a.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1 + 1\n")
    (tmp_path / "list.yaml").write_text(yaml.safe_dump([ENTRY]))
    monkeypatch.setattr(by_hand, "ROOT", tmp_path)
    monkeypatch.setattr(by_hand, "LIST", tmp_path / "list.yaml")
    monkeypatch.setattr(by_hand, "copy_tree", lambda tree: None)
    tree = tmp_path / "by-hand-tree" / "src" / "l2r" / "a.py"
    tree.parent.mkdir(parents=True)
    tree.write_text(source.read_text())
    for tests in ENTRY["tests"]:
        (tmp_path / "by-hand-tree" / tests).mkdir(parents=True)
    return tmp_path


def tried(place, monkeypatch, failing, **options):
    """The result, and what ran, where the tests ``failing`` (mark, folder) notice a change."""
    ran = []

    def run_tests(tree, arguments, seconds):
        _, mark, tests = arguments
        ran.append((mark, tests))
        changed = (tree / "src" / "l2r" / "a.py").read_text() == "x = 1 - 1\n"
        return Outcome(1, "a test") if changed and ran[-1] in failing else Outcome(5, "")

    monkeypatch.setattr(by_hand, "run_tests", run_tests)
    by_hand.run(place, **options)
    assert (place / "by-hand-tree" / "src" / "l2r" / "a.py").read_text() == "x = 1 + 1\n"
    return json.loads((place / "by-hand.json").read_text())["1"]["found"], ran


def test_fast_tests_come_first_and_a_result_is_kept(place, monkeypatch):
    failing = [("slow", "tests/near")]
    assert tried(place, monkeypatch, failing, fast=True)[0] == "nothing"
    found, ran = tried(place, monkeypatch, failing)
    assert (found, ran) == ("slow", failing)  # fast ones ran before
    assert tried(place, monkeypatch, failing) == ("slow", [])
    fast = [("not slow", "tests/near"), ("not slow", "tests/far")]
    assert tried(place, monkeypatch, fast[1:], again=True) == ("fast", fast)
    assert tried(place, monkeypatch, [], again=True) == ("fast", [])


def test_tests_that_are_gone_find_nothing_and_are_named(place, monkeypatch):
    """pytest ends with 4 where a path is missing, which is no failing test."""
    (place / "by-hand-tree" / "tests" / "near").rmdir()
    with pytest.raises(FileNotFoundError, match="change 1 names tests/near, which is gone"):
        tried(place, monkeypatch, [])


def test_a_change_whose_place_is_gone_is_stale_and_said_so(place, monkeypatch):
    for root in (place, place / "by-hand-tree"):
        (root / "src" / "l2r" / "a.py").write_text("x = 2\n")
    by_hand.run(place)
    page = place / "page.md"
    page.write_text("# Mutants\n\n| a |\n\n## stats: survivors\n\nsome\n")
    for _ in range(2):
        assert by_hand.write(page, place) == 1
    text = page.read_text()
    assert (
        text.count("## Changes made by hand") == 1 and "| stats | 1 | 0 | 0 | 0 | 0 | 1 |" in text
    )
    assert "Stale: src/l2r/a.py (change 1), one + two." in text
    assert text.endswith("## stats: survivors\n\nsome\n") and text.startswith("# Mutants\n\n| a |")
