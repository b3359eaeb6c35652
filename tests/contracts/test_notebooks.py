"""The notebooks run offline from top to bottom and print what they were committed with.

Their cells run in a fork, not a kernel: what is tested is the code, which needs no kernel, and a
kernel costs the start of a Python that imports torch.
"""

import json
import re
from pathlib import Path

import pytest

from scripts.pages.notebook_outputs import NOTEBOOKS, cells, kept, run
from tests.processes import Running

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
MACHINE = re.compile(r"/(home|root|tmp|work|Users|mnt|var)/|[A-Z]:\\\\")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def same(one, other):
    """Words, whole numbers and the places of decimals are equal.

    Decimals are not: a processor with other vector units adds in another order, and training
    amplifies that without bound (a radius of 0.36 on one machine was 0.50 on the next). One that is
    no number is a word.
    """
    return NUMBER.sub("0.0", one).split() == NUMBER.sub("0.0", other).split()


def print_outputs(path):
    print(json.dumps(run(path)))


@pytest.mark.slow("whole notebooks")
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs_offline_and_prints_what_is_kept(path, tmp_path):
    surroundings = {"HF_HUB_OFFLINE": "1", "L2R_CACHE": str(tmp_path / "cache")}
    running = Running(tmp_path, print_outputs, path, TMPDIR=str(tmp_path), **surroundings)
    printed = json.loads(running.succeed().splitlines()[-1])
    for number, (fresh, committed) in enumerate(zip(printed, kept(path), strict=True)):
        assert same(fresh, committed), (
            f"cell {number} prints {fresh!r}: run python scripts/pages/notebook_outputs.py"
        )


def test_there_are_four_notebooks():
    assert len(PATHS) == 4


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_small_outputs(path):
    text = path.read_text(encoding="utf-8")
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {} and cell["source"]
        if cell["cell_type"] == "code":
            assert all(output["output_type"] == "stream" for output in cell["outputs"])
            assert cell["execution_count"] is None
            assert set(cell) == {
                "cell_type", "execution_count", "id", "metadata", "outputs", "source",
            }  # fmt: skip
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert not MACHINE.search(text) and len(text) < 20_000
    assert sum(map(bool, kept(path))) >= 3


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(path):
    prose = ["".join(c["source"]) for c in read(path)["cells"] if c["cell_type"] == "markdown"]
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", "\n".join(prose))
    assert targets
    assert [t for t in targets if not (path.parent / t).exists()] == []


def test_a_wrong_cell_and_another_output_are_noticed(tmp_path):
    path = tmp_path / "wrong.ipynb"
    cell = {"cell_type": "code", "source": ["x = 1\n", "assert x == 2"], "outputs": []}
    path.write_text(json.dumps({"cells": [cell]}))
    assert [c["source"] for c in cells(path)] == [cell["source"]] and kept(path) == [""]
    running = Running(tmp_path, print_outputs, Path(path))
    assert running.wait() != 0 and "AssertionError" in running.err
    assert same("loss 2.63, 512 rows", "loss 2.60, 512 rows")
    assert not same("loss 2.63, 512 rows", "loss nan, 512 rows")
    assert not same("512 rows", "513 rows") and not same("a 1.0", "b 1.0")
