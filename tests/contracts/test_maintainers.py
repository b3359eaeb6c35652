"""Pages for maintainers name files, folders, targets and commands that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "CONTRIBUTING.md", "dev/architecture.md", "dev/LOG.md", "tests/README.md", "scripts/README.md",
)  # fmt: skip
BASES = (
    ROOT,
    ROOT / "src",
    ROOT / "src" / "l2r",
    ROOT / "src" / "l2r_lab",
    ROOT / "scripts",
    ROOT / "tests",
)


def named_paths(text):
    """Paths in backticks: with a slash or the ending of a file; ``file.py:name`` is the file.

    Files in the last column of the table of rooms stand in the room of their row.
    """
    text = re.sub(r"^(\| `l2r.+)\| .+? \|$", r"\1|", text, flags=re.M)  # test_statements reads them
    for name in re.findall(r"`([\w./-]+?)(?::\w+)?`", text):
        if ("/" in name or re.search(r"\.(py|md|yaml|cpp|toml)$", name)) and "NAME" not in name:
            yield name


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    names = set(named_paths((ROOT / page).read_text()))
    assert len(names) >= 4
    wrong = [n for n in sorted(names) if not any((base / n).exists() for base in BASES)]
    assert not wrong, wrong


def test_a_file_that_is_gone_is_noticed():
    text = "`src/l2r/gone.py`, `l2r train`, `functional/scoring.py:phi`, `cli/NAME.py`"
    assert list(named_paths(text)) == ["src/l2r/gone.py", "functional/scoring.py"]


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"`?make ([a-z][\w-]*)\b", (ROOT / page).read_text()):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page}: make {target}"


def test_contributing_fits_on_a_screen():
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    assert len(lines) <= 70


def test_walks_of_the_two_pages_begin_and_end_at_the_same_files():
    table = re.findall(
        r"^\| (.+?) \| `src/(.+)` \| `src/(.+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    page = (ROOT / "dev" / "architecture.md").read_text()
    walks = re.findall(r"^\d\. \*\*(.+?)\*\*: (.+?)(?=^\d\. |^## )", page, re.M | re.S)
    ends = []
    for title, text in walks:
        files = re.findall(r"`(l2r[\w/.-]+)`", text.partition(". Its mathematics")[0])
        ends.append((title[0].lower() + title[1:], files[0], files[-1]))
    assert table and table == ends
