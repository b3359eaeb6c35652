"""docs/api.md: every row resolves, every equation and figure of the paper has one."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
ROW = re.compile(
    r"^\| (?P<what>.*) \| `(?P<module>l2r[\w.]*):(?P<name>\w+)` \| `(?P<test>\S+)` \|$"
)


def rows(page):
    """What each row of the tables holds; raises ValueError for a row of another form."""
    lines = [line for line in page.splitlines() if line.startswith("|")]
    found = []
    for line in lines:
        if line.startswith(("|---", "| what", "| | what")):
            continue
        match = ROW.match(line)
        if match is None:
            raise ValueError(f"not of the form | what | `module:name` | `file::test` |: {line}")
        found.append(match.groupdict())
    return found


def check(row):
    """Raise for a function or a test that is not there."""
    assert callable(getattr(import_module(row["module"]), row["name"])), row
    path, _, test = row["test"].partition("::")
    source = (ROOT / path).read_text()
    assert re.search(rf"^def {test}\(", source, flags=re.M) and test.startswith("test_"), row


def equations(page):
    """Numbers of the first column: ``8, 12``, ``28, 30, 31`` or ``24 to 27``."""
    numbers = set()
    for what in (row["what"].split(" | ")[0] for row in rows(page)):
        if re.fullmatch(r"[\d, to]+", what):
            first, *rest = map(int, re.findall(r"\d+", what))
            numbers |= set(range(first, rest[0] + 1)) if " to " in what else {first, *rest}
    return numbers


def test_every_row_names_a_function_and_a_test_that_exist():
    for row in rows(PAGE):
        check(row)


def test_every_equation_has_a_row():
    assert equations(PAGE) == set(range(1, 37))


THIS = "tests/paper/test_paper_map.py::test_every_equation_has_a_row"
GOOD = f"| 1 | x | `l2r.functional:phi` | `{THIS}` |"


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("functional:phi", "functional:chi", AttributeError),
        ("l2r.functional", "l2r.fanctional", ModuleNotFoundError),
        ("test_paper_map.py", "test_no_such.py", FileNotFoundError),
        ("::test_every_equation_has_a_row", "::test_no_equation_has_a_row", AssertionError),
        ("::test_every_equation_has_a_row", "", AssertionError),
        ("`l2r.functional:phi`", "phi", ValueError),
    ],
)
def test_a_row_that_names_nothing_is_found(old, new, error):
    check(*rows(GOOD))
    with pytest.raises(error):
        check(*rows(GOOD.replace(old, new)))
