"""One file of results: appended by many, cut by a kill, each cell once."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from l2r.files.reading import parse_json
from l2r_lab.files.study import CellResult, StudyResults

MACHINE = {"packages": {"torch": "2"}, "gpus": [], "processor": "p"}


def result(seed=0, arm="linear", **recipe):
    curve = [(10, 5.123456789)]
    fields = {"seed": seed, "router": {"kind": "linear"}, **recipe}
    plan, facts = {"digest": "d", "commit": None}, {"seconds": 1.5, **MACHINE}
    return CellResult(arm, seed, {"ce": 1 / 3}, {"ce": 2.0}, curve, fields, plan, facts)


def test_results_come_back_as_they_were_but_for_digits(tmp_path):
    stored = StudyResults(tmp_path / "study")
    assert stored.read() == []
    stored.append(result(3), result(1, arm="l2r"))
    stored.append(result(2))
    first, *_ = read = stored.read()
    assert [(r.arm, r.seed) for r in read] == [("linear", 3), ("l2r", 1), ("linear", 2)]
    assert first == result(3).rounded() and first.trained == {"ce": 0.3333333}
    assert first.curve == [(10, 5.123457)]
    with pytest.raises(ValueError, match="has a result of linear, seed 3"):
        stored.append(result(3))
    assert stored.read() == read


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_measure_that_is_not_finite_is_json_and_read_as_nan(tmp_path, value):
    stored = StudyResults(tmp_path)
    stored.append(replace(result(), trained={"ce": value}, curve=[(10, value), (20, 5.0)]))
    for line in stored.path.read_bytes().splitlines():
        parse_json(line)
    (read,) = stored.read()
    assert math.isnan(read.trained["ce"]) and math.isnan(read.curve[0][1])
    assert read.untrained == {"ce": 2.0} and read.curve[1] == (20, 5.0)


def test_a_recipe_is_stored_once_for_all_seeds_and_again_where_it_differs(tmp_path):
    stored = StudyResults(tmp_path)
    stored.append(*(result(seed) for seed in range(4)))
    stored.append(result(4, rank=2), result(5))
    lines = [json.loads(line) for line in stored.path.read_text().splitlines()]
    assert [("arm" in line) for line in lines] == [False, *[True] * 4, False, True, True]
    assert [r.recipe.get("rank") for r in stored.read()] == [None] * 4 + [2, None]


@pytest.mark.parametrize("cut", [1, 2, 60])
def test_what_a_kill_cut_off_is_ignored_and_then_written_over(tmp_path, cut):
    stored = StudyResults(tmp_path)
    stored.append(result(0), result(1))
    stored.path.write_bytes(stored.path.read_bytes()[:-cut])
    assert [r.seed for r in stored.read()] == [0]
    stored.append(result(1), result(2))
    assert [r.seed for r in stored.read()] == [0, 1, 2]
    assert all(json.loads(line) for line in stored.path.read_text().splitlines())


def test_a_damaged_line_is_named(tmp_path):
    stored = StudyResults(tmp_path)
    stored.append(result(0), result(1))
    lines = stored.path.read_text().splitlines(keepends=True)
    stored.path.write_text("".join([*lines[:1], lines[1][: len(lines[1]) // 2] + "\n", lines[2]]))
    with pytest.raises(ValueError, match=r"line 2 of .*results\.jsonl is not the result of a cell"):
        stored.read()


@pytest.mark.parametrize(
    "facts", [{}, MACHINE | {"packages": {}}, MACHINE | {"gpus": None}, MACHINE | {"seconds": "1"}]
)
def test_facts_that_a_report_cannot_show_are_refused(facts, tmp_path):
    stored = StudyResults(tmp_path)
    stored.append(result(0))
    stored.append(replace(result(1), facts=facts))
    with pytest.raises(
        ValueError, match=r"line 3 of .*results\.jsonl is not .*: .*facts must have"
    ):
        stored.read()


def test_of_two_results_of_a_cell_the_first_counts(tmp_path):
    stored = StudyResults(tmp_path)
    stored.append(result(0))
    other = StudyResults(tmp_path / "other")
    other.append(replace(result(0), trained={"ce": 9.0}), result(1))
    with stored.path.open("a") as stream:  # as a merge of two checkouts leaves it
        stream.write(other.path.read_text())
    assert [(r.seed, r.trained["ce"]) for r in stored.read()] == [(0, 0.3333333), (1, 0.3333333)]


def test_processes_append_at_once_and_lose_nothing(tmp_path):
    """Four processes, each with 25 results of an arm of its own; every line is whole."""
    code = (
        "import sys; from pathlib import Path; from l2r_lab.files.study import StudyResults\n"
        "from tests.l2r_lab.files.test_study import result\n"
        "print('ready', flush=True); sys.stdin.read(1)\n"
        "stored = StudyResults(Path(sys.argv[1]))\n"
        "for seed in range(25): stored.append(result(seed, arm=sys.argv[2]))"
    )
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", code, str(tmp_path / "study")]
    running = [subprocess.Popen([*command, arm], **pipe) for arm in "abcd"]
    assert [process.stdout.readline() for process in running] == ["ready\n"] * 4
    for process in running:
        process.stdin.write("x")
        process.stdin.flush()
    assert [process.wait() for process in running] == [0] * 4
    for process in running:
        process.stdin.close()
        process.stdout.close()
    found = StudyResults(tmp_path / "study").read()
    assert {(r.arm, r.seed) for r in found} == {(a, s) for a in "abcd" for s in range(25)}
    lines = (tmp_path / "study" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 101 and all(map(json.loads, lines))
