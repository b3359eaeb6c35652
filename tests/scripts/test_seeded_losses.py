"""The script that compares two source trees reads every stored result of a study."""

import importlib.util
from pathlib import Path

import pytest

from l2r_lab.files.study import CellResult, StudyResults

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "proofs" / "seeded_losses.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("seeded_losses", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_are_read_without_the_lines_of_their_recipes(script, tmp_path):
    recipe, plan = {"seed": 0, "task": "language"}, {"digest": "d", "commit": None}
    losses = {"validation_ce": 5.0}
    cell = CellResult("linear", 0, losses, losses, [(10, 6.0)], recipe, plan, {"seconds": 1.0})
    StudyResults(tmp_path / "two-arms").append(cell)
    (result,) = script.stored_results(tmp_path)
    assert (result["arm"], result["trained"]) == ("linear", losses)


def test_a_number_that_differs_and_a_measure_of_none_are_found(script, tmp_path, capsys):
    trees = (Path("before"), Path("after"))
    numbers = {"before": {("ce",): 1.0, ("old",): 2.0}, "after": {("ce",): 1.0, ("new",): 3.0}}

    def run(tree, folder):
        return numbers[tree.name]

    assert script.compare("same", run, trees)
    assert "1 values of 2 and 2 identical" in capsys.readouterr().out
    numbers["after"]["ce",] = 1.5
    assert not script.compare("other", run, trees)
    assert "('ce',): 1.0, 1.5" in capsys.readouterr().out
    numbers["after"] = {}
    assert not script.compare("nothing in common", run, trees)
