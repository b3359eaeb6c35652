"""What the package promises about itself: light import, honest docs, small files."""

import re
import subprocess
import sys
from pathlib import Path

import l2r

ROOT = Path(__file__).resolve().parents[2]


def test_import_l2r_is_light():
    heavy = ("transformers", "plotly", "datasets", "pydantic", "typer", "rich", "sklearn")
    script = f"import sys, l2r; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert found.strip() == "[]"


def test_every_export_exists_and_there_are_few():
    assert all(hasattr(l2r, name) for name in l2r.__all__) and len(l2r.__all__) <= 16


def test_no_file_is_longer_than_400_lines():
    lengths = {p.name: len(p.read_text().splitlines()) for p in (ROOT / "src").rglob("*.py")}
    assert {name: n for name, n in lengths.items() if n > 400} == {}


def test_architecture_names_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [p.name for p in (ROOT / "src" / "l2r").iterdir() if (p / "__init__.py").is_file()]
    assert [room for room in rooms if f"`{room}/`" not in text] == []


def test_functional_is_pure():
    for path in (ROOT / "src" / "l2r" / "functional").glob("*.py"):
        source = path.read_text()
        assert "nn." not in source and ".cuda" not in source, path.name


def test_version_is_the_changelogs_newest():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert newest is not None and newest.group(1) == l2r.__version__


def test_a_router_file_stays_small():
    shared = {"__init__.py", "base.py", "registry.py", "rules.py"}
    for path in (ROOT / "src" / "l2r" / "routers").glob("*.py"):
        lines = [n for n in path.read_text().splitlines() if n.strip()]
        assert path.name in shared or len(lines) <= 125, (path.name, len(lines))
