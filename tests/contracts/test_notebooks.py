"""The notebooks run offline from top to bottom, and are committed without outputs.

Their cells run in a fork, not a kernel: what is tested is the code, which needs no kernel, and a
kernel costs the start of a Python that imports torch.
"""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.processes import script

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MACHINE = re.compile(r"/(home|root|tmp|work|Users|mnt|var)/|[A-Z]:\\\\")
# What a notebook shows at the end of a cell, it can show.
SHOW = """
def shown(value):
    if hasattr(value, "to_plotly_json"):
        assert value.data
        value.to_json()
"""


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def code(path):
    cells = [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]
    return ["".join(cell["source"]) for cell in cells]


def as_script(cells):
    """One script; the expression that ends a cell goes to ``shown``, as a kernel displays it."""
    trees = [ast.parse(cell) for cell in cells]
    for tree in trees:
        last = tree.body[-1]
        if isinstance(last, ast.Expr):
            name = ast.Name("shown", ast.Load())
            last.value = ast.Call(name, [last.value], [])
    return "\n".join([SHOW, *(ast.unparse(ast.fix_missing_locations(tree)) for tree in trees)])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_offline(path, tmp_path):
    surroundings = {"HF_HUB_OFFLINE": "1", "L2R_CACHE": str(tmp_path / "cache")}
    script(tmp_path, as_script(code(path)), TMPDIR=str(tmp_path), **surroundings).succeed()


def test_there_are_three_notebooks():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path):
    text = path.read_text(encoding="utf-8")
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {} and cell["source"]
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            assert set(cell) == {
                "cell_type", "execution_count", "id", "metadata", "outputs", "source",
            }  # fmt: skip
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert not MACHINE.search(text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path):
    prose = ["".join(c["source"]) for c in read(path)["cells"] if c["cell_type"] == "markdown"]
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", "\n".join(prose))
    assert targets
    assert [t for t in targets if not (path.parent / t).exists()] == []


def test_a_wrong_cell_fails(tmp_path):
    running = script(tmp_path, as_script(["x = 1\nassert x == 2"]))
    assert running.wait() != 0 and "AssertionError" in running.err
