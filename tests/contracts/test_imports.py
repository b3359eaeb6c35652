"""Every name of ours that a script, a test, a notebook or a page imports is there.

Scripts, tests of engines and blocks that are not run would notice a deleted name only in the
environment they are meant for. Packages of others need not be installed here: nothing is executed.
"""

import ast
import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.tiers import few

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("l2r", "l2r_lab")
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.S | re.M)
PLACES = ("scripts/**/*.py", "tests/**/*.py", "notebooks/*.ipynb", "docs/*.md", "*.md")


def code(path: Path) -> Iterator[str]:
    """Python sources of a file: itself, the cells of a notebook, the blocks of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield text
    elif path.suffix == ".md":
        yield from (
            re.sub(f"^{indent}", "", block, flags=re.M) for indent, block in BLOCK.findall(text)
        )
    else:
        yield from (
            "".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"
        )


def source(module: str) -> Path | None:
    """File of a module of ours, None where there is none."""
    place = (ROOT / "src").joinpath(*module.split("."))
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if file.is_file()), None)


@cache
def names(module: str) -> frozenset[str]:
    """Names that the source of a module binds anywhere outside its functions and classes."""
    found, waiting = set(), [ast.parse(source(module).read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return frozenset(found)


def is_there(module: str, name: str | None) -> bool:
    """Whether ``module`` of ours exists and, unless None, ``name`` can be imported from it."""
    if source(module) is None:
        return False
    if name in (None, "*") or name in names(module) or source(f"{module}.{name}") is not None:
        return True
    return "__getattr__" in names(module) and hasattr(importlib.import_module(module), name)


def missing(text: str) -> list[str]:
    """Imports from our packages that lead nowhere, as ``module`` or ``module.name``."""
    wanted = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            wanted += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            wanted += [(node.module, alias.name) for alias in node.names]
    ours = [pair for pair in wanted if pair[0].split(".")[0] in PACKAGES]
    return [".".join(filter(None, pair)) for pair in ours if not is_there(*pair)]


@pytest.mark.parametrize("place", few(PLACES, PLACES[2:], "every file is read"))
def test_every_import_from_our_packages_leads_somewhere(place):
    paths = sorted(ROOT.glob(place))
    wrong = {str(p.relative_to(ROOT)): [n for c in code(p) for n in missing(c)] for p in paths}
    assert paths and {path: absent for path, absent in wrong.items() if absent} == {}


def test_a_deleted_name_is_noticed():
    text = """
import l2r.routers.rules, l2r.routers.selection_rule
from l2r import Router, RouterConfig, build_router, gone
def inside():
    from l2r.routers import Router, selection_rule, rules
    from l2r.engines.olmo_core import L2RRouterConfig, L2RRouter
    from l2r_lab.training import train, gone
    from olmo_core.nothing import nobody
"""
    assert sorted(missing(text)) == [
        "l2r.engines.olmo_core.L2RRouter", "l2r.gone", "l2r.routers.rules",
        "l2r.routers.rules", "l2r_lab.training.gone",
    ]  # fmt: skip


def test_blocks_of_pages_and_cells_of_notebooks_are_read():
    pages = (ROOT / "docs" / name for name in ("engines.md", "swap.md"))
    for path in (*pages, *ROOT.glob("notebooks/*.ipynb")):
        assert sum("l2r" in text for text in code(path)) >= 2, path
