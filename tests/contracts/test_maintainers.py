"""Pages for maintainers name files, folders, targets and commands that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("CONTRIBUTING.md", "dev/architecture.md", "tests/README.md", "scripts/README.md")
BASES = (ROOT, ROOT / "src" / "l2r", ROOT / "scripts", ROOT / "tests")


def named_paths(text):
    """Paths in backticks: with a slash or the ending of a file; ``file.py:name`` is the file."""
    for name in re.findall(r"`([\w./-]+?)(?::\w+)?`", text):
        if ("/" in name or re.search(r"\.(py|md|yaml|cpp|toml)$", name)) and "NAME" not in name:
            yield name


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    names = set(named_paths((ROOT / page).read_text()))
    assert len(names) >= 4
    assert [n for n in sorted(names) if not any((base / n).exists() for base in BASES)] == []


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
    assert len(lines) <= 70 and "four walks" in (ROOT / "CONTRIBUTING.md").read_text().lower()
