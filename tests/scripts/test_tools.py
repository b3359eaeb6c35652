"""The table of other people's programs: what holds for stock must hold for ours."""

import torch

from scripts.others.tools.rows import Result, Row, row, run
from scripts.others.tools.subjects import SUBJECTS, logits
from scripts.others.tools.table import is_worse, markdown


def results(**errors):
    """A claim for two families; errors by kind_family."""
    subjects = [("stock", "a"), ("stock", "b"), ("swapped", "a"), ("swapped", "b"), ("own", "a")]
    return [Result("it runs", k, f, errors.get(f"{k}_{f}", "")) for k, f in subjects]


def cells(rows):
    page = markdown({"tool": rows}, {"tool": "1.0"})
    return next(line for line in page.splitlines() if line.startswith("| it runs")).split("|")[2:5]


def test_all_is_well():
    assert cells(results()) == [" ok ", " ok ", " ok "]
    assert not is_worse(results())


def test_a_family_that_fails_as_stock_does_is_named_and_no_fault():
    rows = results(stock_b="E: no", swapped_b="E: no")
    assert cells(rows) == [" ok; fails: b ", " ok; as stock: b ", " ok "]
    assert not is_worse(rows)


def test_a_family_that_fails_where_stock_does_not_is_a_fault():
    for name in ("swapped_a", "swapped_b", "own_a"):
        assert is_worse(results(**{name: "E: no"})), name
    assert cells(results(swapped_a="E", swapped_b="E"))[1] == " fails "
    assert cells(results(stock_a="E", own_a="E", swapped_a="E", swapped_b="E"))[1:] == [
        " fails ",
        " as stock ",
    ]


def test_a_check_that_raises_is_one_line_of_its_subject_alone():
    rows: list[Row] = []

    @row(rows, "claim")
    def check(subject):
        assert subject.kind != "own", "first line\nsecond line"

    errors = {result.error for result in run(rows) if result.kind == "own"}
    assert errors == {"AssertionError: first line"}
    assert [r.error for r in run(rows) if r.kind != "own"] == [""] * (len(SUBJECTS) - 1)
    assert run(rows, only="another") == []


def test_a_subject_has_the_same_weights_whatever_the_seed():
    for subject in (SUBJECTS[0], SUBJECTS[6], SUBJECTS[-1]):
        torch.manual_seed(1)
        first = logits(subject.model())
        torch.manual_seed(2)
        assert torch.equal(logits(subject.model()), first)
