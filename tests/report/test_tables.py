"""A table shows values as they are, and prints what is best of a column bold."""

import math
import re

import pytest
from markdown_it import MarkdownIt
from scipy.stats import binomtest

from l2r.report.tables import Table
from l2r.stats.intervals import mean_interval
from l2r_lab.report.paper_tables import (
    accuracy_table,
    downstream_table,
    images_table,
    seeds_caption,
)
from tests.report.runs import bold


def table_of(rows, **options):
    return Table("t", ("name", "loss", "gain", "note"), rows, **options)


def test_the_largest_is_bold_where_more_is_better_and_the_least_where_less_is():
    rows = (("a", 0.3, 0.3, 9.0), ("b", 0.1, 0.1, 8.0), ("c", 0.2, 0.2, 7.0))
    assert bold(table_of(rows, best=(("loss", "min"), ("gain", "max")))) == {
        "loss": ["b"],
        "gain": ["a"],
    }


def test_values_that_print_alike_are_as_good():
    rows = (("a", 0.10001, 1, None), ("b", 0.10002, 2, None), ("c", 0.2, 2, None))
    assert bold(table_of(rows, best=(("loss", "min"), ("gain", "max")))) == {
        "loss": ["a", "b"],
        "gain": ["b", "c"],
    }
    finer = table_of(rows, best=(("loss", "min"),), digits=5)
    assert bold(finer) == {"loss": ["a"]}


@pytest.mark.parametrize("missing", [None, math.nan, "text"])
def test_what_is_no_number_is_never_best(missing):
    rows = (("a", missing, 1, None), ("b", -1.0, 2, None), ("c", -2.0, 3, None))
    for direction, name in (("max", "b"), ("min", "c")):
        assert bold(table_of(rows, best=(("loss", direction),))) == {"loss": [name]}


def test_one_value_and_values_that_are_all_alike_have_no_best():
    rows = (("a", 1.0, 7, 0), ("b", None, 7, 0))
    best = (("loss", "min"), ("gain", "max"))
    assert bold(table_of(rows, best=best)) == {}
    assert bold(table_of(rows[:1], best=best)) == {}


def test_values_are_shown_with_their_digits_and_words():
    table = table_of((), digits=2)
    shown = {1.005: "1.00", -0.126: "-0.13", True: "yes", None: "-", math.nan: "-"}
    assert {value: table.show(value) for value in shown} == shown
    assert table.show(False) == "no" and table.show(1234567) == "1,234,567"
    assert table.show(math.inf) == "inf" and table.show("text") == "text"


def test_names_in_backticks_are_code_under_a_table_too():
    caption = "see `l2r diagnose a<b`"
    assert "see <code>l2r diagnose a&lt;b</code>" in table_of((), caption=caption).to_html()


def test_records_and_markdown_have_every_value_under_its_column():
    table = table_of((("a", 0.25, 1, None),))
    assert table.records() == [{"name": "a", "loss": 0.25, "gain": 1, "note": None}]
    assert table.to_markdown() == (
        "| name | loss | gain | note |\n| --- | --- | --- | --- |\n| a | 0.2500 | 1 | - |\n"
    )


@pytest.mark.parametrize("separator", ["|", "\n"])
def test_no_name_breaks_a_row_of_markdown(separator):
    rows = ((f"a{separator}b", 0.5), ("e", 0.25))
    table = Table("t", (f"c{separator}d", "loss"), rows)
    html = MarkdownIt().enable("table").render(table.to_markdown())
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", html)
    shown = separator.replace("\n", " ")
    assert cells == [f"c{shown}d", "loss", f"a{shown}b", "0.5000", "e", "0.2500"]


def test_both_accuracies_of_a_router_are_better_the_larger_and_stand_in_their_columns():
    first, second = (mean_interval(values) for values in ([50.0, 52.0], [80.0, 83.0]))
    low, lower = (mean_interval(values) for values in ([40.0, 41.0], [70.0, 72.0]))
    table = accuracy_table({"linear": (first, second, 2), "xmoe": (low, lower, 2)})
    assert bold(table) == {"Top-1 (%)": ["Linear"], "Top-5 (%)": ["Linear"]}
    (row, _) = table.records()
    assert (row["Top-1 (%)"], row["Top-5 (%)"]) == (51.0, 81.5)
    assert row["± top-1"] == pytest.approx(first.half) == pytest.approx(12.7062)
    assert row["± top-5"] == pytest.approx(second.half) == pytest.approx(1.5 * 12.7062)
    assert table.caption == seeds_caption([2])
    single = accuracy_table({"linear": (first, second, 2), "xmoe": (low, lower, 1)})
    assert [row["± top-1"] is None for row in single.records()] == [False, True]
    assert "1/2 seeds" in single.caption


def test_a_difference_keeps_its_sign_and_its_ends_in_order():
    table = downstream_table(
        ("BoolQ", "PIQA"),
        {"a": {"BoolQ": (61.0, 58.0, 64.0), "PIQA": (70.0, 68.0, 72.0)}},
        {"b - a": {"BoolQ": (-0.02, -0.05, 0.01)}},
    )
    assert table.rows == (
        ("a", 61.0, 70.0),
        ("95% from", 58.0, 68.0),
        ("95% to", 64.0, 72.0),
        ("b - a", -2.0, None),
        ("95% from", -5.0, None),
        ("95% to", 1.0, None),
    )


def test_the_interval_of_an_accuracy_is_wilsons():
    record = {"checkpoint": "c", "averaged": True, "ce": 1.5, "skipped": ["x"], "images": 400}
    own, low, high = images_table({**record, "top1": 0.2, "top5": 0.5}).rows
    assert own == ("c (average)", 20.0, 50.0, 1.5, 400, 1)
    for (name, *bounds), side in ((low, "low"), (high, "high")):
        assert name == {"low": "95% from", "high": "95% to"}[side]
        expected = [getattr(binomtest(count, 400).proportion_ci(method="wilson"), side)
                    for count in (80, 200)]  # fmt: skip
        assert bounds[:2] == pytest.approx([100 * value for value in expected], rel=1e-4)
