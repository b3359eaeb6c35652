"""The table of cells in docs/swap.md, the results that are kept, and how a stopped run goes on."""

import pytest

from l2r.hf.swap.families import FAMILIES
from scripts.pages import cells_page
from scripts.pages.cells_page import FAILED, REFUSED, RIGHT, Made, Outcome
from scripts.pages.marks import section_of
from tests.hf.family_sizes import OWN_SIZES
from tests.system.cells import COMMANDS, FACTS, KINDS, Cell, cover

FIRST, SECOND, THIRD = (Cell("olmoe", "bf16", "stock", c) for c in ("load", "check", "export"))
NOW = Made("0123abcd", "l2r-moe 1, transformers 5, torch 2")
OTHER_COMMIT, OTHER_VERSIONS = NOW._replace(commit="4567cdef"), NOW._replace(versions="torch 3")


@pytest.fixture
def now(monkeypatch):
    monkeypatch.setattr(cells_page, "made", lambda: NOW)


def test_the_page_says_what_the_committed_results_say():
    text = section_of(cells_page.PAGE.read_text(encoding="utf-8"), cells_page.SECTION)
    found, before = cells_page.kept(), cells_page.kept(cells_page.BEFORE)
    assert text == cells_page.section(found, cells_page.every_cell(), before)


def test_what_was_right_before_is_right_now():
    found, before = cells_page.kept(), cells_page.kept(cells_page.BEFORE)
    assert cells_page.lost_since(found, before) == []
    assert sum(cell in found for cell in before) > 1000


def test_the_page_has_every_family_kind_and_command():
    text = section_of(cells_page.PAGE.read_text(encoding="utf-8"), cells_page.SECTION)
    assert all(f"\n| `{name}` |" in text for name in (*OWN_SIZES, *COMMANDS))
    assert f"| {' | '.join(KINDS)} |" in text


def test_every_cell_is_tried_once_and_those_of_all_pairs_first():
    cells = cells_page.every_cell()
    folders = len(FAMILIES) * 3 * (len(KINDS) - 1) + 3  # own models are of one family
    assert len(set(cells)) == len(cells) == folders * len(COMMANDS)
    first = len(cover()) + len(cover(list(FAMILIES)))
    assert {(c.family, c.command) for c in cells[:first]} == {
        (family, command) for family in FAMILIES for command in COMMANDS
    }


def test_every_command_says_what_is_compared_with_what():
    assert all("; " in (run.__doc__ or "") for run in COMMANDS.values())


def test_the_table_counts_right_of_tried_and_names_failures_and_facts():
    fact = next(fact for fact in FACTS if "export" in fact.commands)
    found = {
        FIRST: Outcome(RIGHT, "", NOW),
        SECOND: Outcome(FAILED, "AssertionError: loads", NOW),
        THIRD: Outcome(REFUSED, fact.why, OTHER_COMMIT),
    }
    before = {
        FIRST: Outcome(FAILED, "no", OTHER_COMMIT), SECOND: Outcome(RIGHT, "", OTHER_COMMIT)
    }  # fmt: skip
    text = cells_page.section(found, [FIRST, SECOND, THIRD], before)
    assert "| `load` | 0 / 0 / 1 | 1 / 0 / 0 |" in text and "in 2 of the cells" in text
    assert "Right there and not now: `olmoe-bf16-stock-check` (AssertionError: loads)." in text
    assert "| `olmoe` | 1/2 |" in text and "3 of 3 cells were tried: 1 are right" in text
    assert "`olmoe-bf16-stock-check` (AssertionError: loads)." in text
    assert f"- `export`: {fact.why} (1 cells)." in text
    assert "(l2r-moe 1, transformers 5, torch 2; commits 0123abcd (2), 4567cdef (1);" in text
    assert "the others were not tried" not in text
    assert "the others were not tried" in cells_page.section(
        found, [*found, FIRST._replace(command="record")], before
    )


def test_results_are_kept_a_line_a_folder_commit_and_versions(tmp_path):
    found = {
        FIRST: Outcome(RIGHT, "", NOW),
        SECOND: Outcome(FAILED, "AssertionError: loads", NOW),
        THIRD: Outcome(REFUSED, "why", NOW),
        FIRST._replace(command="swap"): Outcome(RIGHT, "", OTHER_COMMIT),
        FIRST._replace(dtype="fp16"): Outcome(RIGHT, "", OTHER_VERSIONS),
    }
    path = tmp_path / "cells.jsonl"
    path.write_text(cells_page.lines(found))
    assert len(path.read_text().splitlines()) == 3
    assert cells_page.kept(path) == found
    assert cells_page.lines(cells_page.kept(path)) == path.read_text()
    path.write_text(path.read_text().replace('"olmoe", "dtype": "fp16"', '"gone", "dtype": "fp16"'))
    assert cells_page.kept(path).keys() == {cell for cell in found if cell.dtype == "bf16"}


@pytest.mark.usefixtures("now")
def test_failed_cells_come_first_and_those_of_other_versions_last():
    cells = [FIRST._replace(command=name) for name in ("load", "check", "swap", "serve", "record")]
    outcomes = [
        Outcome(RIGHT, "", OTHER_VERSIONS), Outcome(RIGHT, "", NOW),
        Outcome(RIGHT, "", OTHER_COMMIT), Outcome(FAILED, "no", OTHER_COMMIT),
    ]  # fmt: skip
    found = dict(zip(cells, outcomes, strict=False))
    names = ["serve", "record", "load"]
    assert [cell.command for cell in cells_page.remaining(cells, found)] == names
    again = cells_page.remaining(cells, found, again=True)
    assert [cell.command for cell in again] == [*names, "swap"]


@pytest.mark.usefixtures("now")
def test_a_stopped_run_goes_on_with_what_is_left_or_failed(tmp_path, monkeypatch):
    path = tmp_path / "kept" / "cells.jsonl"
    seen = []

    def try_cell(cell, folder_of):
        seen.append(cell)
        if cell == SECOND and seen.count(cell) == 1:
            raise ValueError("no such layer")
        return ""

    monkeypatch.setattr(cells_page.cells, "try_cell", try_cell)
    wanted = [FIRST, SECOND]
    tried = dict(cells_page.try_all(wanted, path, 60))
    assert tried == {
        FIRST: (RIGHT, "", NOW),
        SECOND: (FAILED, "ValueError: no such layer", NOW),
    }
    left = cells_page.remaining([*wanted, THIRD], cells_page.kept(path))
    assert left == [SECOND, THIRD]
    assert list(cells_page.try_all(left, path, 0)) == []
    assert [cell for cell, _ in cells_page.try_all(left, path, 60)] == [SECOND, THIRD]
    assert set(cells_page.kept(path).values()) == {(RIGHT, "", NOW)}


@pytest.mark.usefixtures("now")
def test_the_cells_of_a_folder_are_kept_though_the_next_is_interrupted(tmp_path, monkeypatch):
    def try_cell(cell, folder_of):
        if cell == SECOND:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr(cells_page.cells, "try_cell", try_cell)
    path = tmp_path / "cells.jsonl"
    with pytest.raises(KeyboardInterrupt):
        list(cells_page.try_all([FIRST, SECOND], path, 60))
    assert cells_page.kept(path) == {FIRST: (RIGHT, "", NOW)}


def test_a_cell_that_failed_leaves_no_folder_or_model_to_the_next(tmp_path, monkeypatch):
    seen = []

    def try_cell(cell, folder_of):
        seen.append(list(folder_of.made))
        folder_of.made[cell[:3]] = None
        if cell == FIRST:
            raise ValueError("hooks of mine are in the model")
        return ""

    monkeypatch.setattr(cells_page.cells, "try_cell", try_cell)
    list(cells_page.try_all([FIRST, SECOND, THIRD], tmp_path / "cells.jsonl", 60))
    assert seen == [[], [], [FIRST[:3]]]


@pytest.mark.parametrize("error", [AssertionError(""), KeyError("x")])
def test_any_error_of_a_cell_is_a_failure(error, tmp_path, monkeypatch):
    def try_cell(cell, folder_of):
        raise error

    monkeypatch.setattr(cells_page.cells, "try_cell", try_cell)
    ((_, outcome),) = cells_page.try_all([FIRST], tmp_path / "cells.jsonl", 60)
    assert outcome.state == FAILED and type(error).__name__ in outcome.why
