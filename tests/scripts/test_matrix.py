"""The table of dev/versions.md, written by machines that have run a part of it each."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_machine_changes_the_rows_that_it_has_run_and_keeps_the_others(tmp_path):
    matrix = runpy.run_path(str(ROOT / "scripts" / "machines" / "matrix.py"))
    write, page = matrix["write_page"], tmp_path / "versions.md"
    write.__globals__["PAGE"] = page
    page.write_text("head\n" + "".join(matrix["MARKS"]) + "foot\n")
    versions = {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "numpy": "2.4.6"}
    counts = {"passed": 7, "failed": 1, "skipped": 0, "failures": ["a::b"]}
    base = {"name": "base", "settings": {}, "commit": "c0ffee", **versions, **counts}
    other = {**base, "name": "torch-2.10", "settings": {"A": "1"}}
    names = ["base", "torch-2.10", "never-run"]
    write([base, other], names)
    first = page.read_text()
    assert "| torch-2.10 | 3.11.7 | 2.13.0 | 5.23.0 | 2.4.6 | `A=1` | 7 | 1 | 0 | c0ffee |" in first
    assert first.endswith("\n\nbase: `a::b`\n\ntorch-2.10: `a::b`\n<!-- end of table -->\nfoot\n")
    write([base], names)
    assert page.read_text() == first
    write([base | {"failed": 0, "failures": []}], names)
    expected = first.replace("\nbase: `a::b`\n", "").replace("| 7 | 1 |", "| 7 | 0 |", 1)
    assert page.read_text() == expected


def test_the_matrix_installs_what_make_test_installs():
    extras = runpy.run_path(str(ROOT / "scripts" / "machines" / "matrix.py"))["EXTRAS"]
    makefile = (ROOT / "Makefile").read_text()
    made = dict(re.findall(r"^(\w+_EXTRAS) := (.*)$", makefile, re.M))
    assert extras == made["TEST_EXTRAS"].replace("$(DEMO_EXTRAS)", made["DEMO_EXTRAS"])
