"""The comparison of runs: what is compared, what is bold, what stays empty."""

import json
import re

import pytest
import yaml

from l2r.report import comparison
from l2r.report.comparison import accuracy_over_seeds, comparison_table, write_report
from l2r.runs.folder import RunFolder

UNIT = 10  # tokens a step


def write_run(root, name, losses, *, done=True, planned=120, parameters=1000, balance=4.0):
    """A run folder: validation loss by step, training records every ten steps."""
    run = RunFolder(root / name)
    run.create()
    run.recipe.write_text(yaml.safe_dump({"training": {"steps": planned}}))
    facts = {"parameters": parameters, "router_parameters": 7, "steps": planned}
    run.environment.write_text(json.dumps(facts))
    last = planned if done else max(losses) + 10
    records = [
        {"kind": "train", "step": s, "tokens": s * UNIT, "ce": 6.0, "balance": balance + s / 1000}
        for s in range(10, last + 1, 10)
    ]
    records += [
        {"kind": "validation", "step": s, "tokens": s * UNIT, "ce/docs": v, "ce/mean": v}
        for s, v in losses.items()
    ]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    if done:
        run.model.mkdir()
        (run.model / "config.json").write_text("{}")
    return run


def cells(table, row):
    (values,) = (r for r in table.rows if r[0].startswith(row))
    return dict(zip(table.columns, values, strict=True))


def bold(page):
    return set(re.findall(r"<b>([^<]*)</b>", page))


def test_an_unfinished_run_is_marked_and_all_are_compared_at_a_step_that_all_have(tmp_path):
    ended = write_run(tmp_path, "linear", {60: 6.30, 120: 5.97})
    late = write_run(tmp_path, "xmoe", {60: 6.25}, done=False)
    table = comparison_table([ended, late])
    assert cells(table, "xmoe")["router"] == "xmoe (unfinished: step 70 of 120)"
    assert cells(table, "linear")["CE mean"] == 6.30 and cells(table, "xmoe")["CE mean"] == 6.25
    assert [cells(table, name)["tokens"] for name in ("linear", "xmoe")] == [600, 600]
    # the last tenth before step 60, of both
    assert cells(table, "linear")["balance loss"] == pytest.approx(4.06)
    assert cells(table, "xmoe")["balance loss"] == pytest.approx(4.06)
    assert "at step 60, the last that all of them have" in table.caption


def test_runs_without_a_common_step_are_not_compared(tmp_path):
    ended = write_run(tmp_path, "linear", {120: 5.97})
    late = write_run(tmp_path, "xmoe", {60: 6.25}, done=False)
    table = comparison_table([ended, late])
    assert cells(table, "xmoe")["CE mean"] is None and cells(table, "linear")["CE mean"] is None
    assert "no validation at a step that all of them have" in table.caption
    alone = comparison_table([late])  # one run is compared with nothing
    assert cells(alone, "xmoe")["CE mean"] == 6.25 and cells(alone, "xmoe")["tokens"] == 600


def test_finished_runs_are_compared_at_their_ends(tmp_path):
    runs = [
        write_run(tmp_path, "linear", {60: 6.30, 120: 5.97}),
        write_run(tmp_path, "xmoe", {60: 6.25, 120: 5.99}),
    ]
    table = comparison_table(runs)
    assert [row[table.columns.index("CE mean")] for row in table.rows] == [5.97, 5.99]
    assert "5.9700" in bold(table.to_html()) and "5.9900" not in bold(table.to_html())


def test_runs_of_different_lengths_have_no_best_loss(tmp_path):
    short = write_run(tmp_path, "linear", {60: 6.30, 120: 5.97})
    longer = write_run(tmp_path, "xmoe", {120: 5.90, 240: 5.70}, planned=240)
    table = comparison_table([short, longer])
    assert [row[table.columns.index("tokens")] for row in table.rows] == [1200, 2400]
    assert not {"5.7000", "5.9700"} & bold(table.to_html())
    assert "trained on different numbers of tokens" in table.caption


def test_the_page_says_the_tokens_and_parameters_of_each_and_what_is_unfinished(tmp_path):
    write_run(tmp_path, "linear", {60: 6.30, 120: 5.97}, parameters=1000)
    write_run(tmp_path, "xmoe", {60: 6.25}, done=False, parameters=1200)
    runs = [RunFolder(tmp_path / "linear"), RunFolder(tmp_path / "xmoe")]
    _, page = write_report(runs, tmp_path / "page.html")
    text = page.read_text()
    assert "1,000 to 1,200 parameters" in text and "700 to 1,200 tokens" in text
    assert "1 of 2 is unfinished: xmoe" in text


def test_empty_routing_columns_name_the_command_that_fills_them(tmp_path):
    run = write_run(tmp_path, "linear", {120: 5.97})
    table = comparison_table([run])
    assert cells(table, "linear")["mean margin"] is None
    assert f"l2r diagnose {run.path} --out {tmp_path}" in table.caption
    several = comparison_table([run, write_run(tmp_path, "xmoe", {120: 5.9})])
    assert f"l2r diagnose {run.path} {tmp_path / 'xmoe'} --out {tmp_path}" in several.caption


def test_an_unfinished_run_is_no_seed_of_an_accuracy(tmp_path):
    def images(name, top1, done):
        run = write_run(tmp_path, name, {120: 1.0}, done=done, planned=120)
        record = {"kind": "validation", "step": 120, "images": 1, "top1": top1, "top5": 1.0}
        run.metrics.write_text(json.dumps(record) + "\n")
        return run

    runs = [images("linear", 0.5, True), images("linear.seed-1", 0.7, True)]
    runs.append(images("linear.seed-2", 0.1, False))
    (table,) = accuracy_over_seeds(runs)
    (row,) = table.records()
    assert any("60.0" in str(value) for value in row.values())


def diagnosed(monkeypatch, values):
    """Runs whose diagnoses hold one number everywhere."""

    class Numbers:
        def __init__(self, value):
            self.value = value

        def numbers(self):
            return {field: self.value for _, field, _ in comparison._ROUTING}

    monkeypatch.setattr(comparison, "is_diagnosed", lambda path: True)
    monkeypatch.setattr(comparison, "read_diagnosis", lambda path: Numbers(values[path.name]))


BETTER = {
    "CE docs": "smaller",
    "CE mean": "smaller",
    "balance loss": "smaller",
    "low-margin rate": "smaller",
    "router params": "smaller",
    "mean margin": "larger",
    "stability": "larger",
    "top-k overlap": "larger",
    "margin / spread": "larger",
    "load entropy": "larger",
    "routing gain": "larger",
}


def test_every_column_marks_its_better_value(tmp_path, monkeypatch):
    first = write_run(tmp_path, "linear", {120: 5.0}, balance=4.0)
    second = write_run(tmp_path, "xmoe", {120: 6.0}, balance=5.0)
    second.environment.write_text(json.dumps({"router_parameters": 9, "steps": 120}))
    diagnosed(monkeypatch, {"linear": 0.25, "xmoe": 0.75})
    table = comparison_table([first, second])
    rows = re.findall(r"<tr>(<td.*?)</tr>", table.to_html())
    marked = {}
    for number, row in enumerate(rows):
        values = re.findall(r"<td[^>]*>(.*?)</td>", row)
        for column, value in zip(table.columns, values, strict=True):
            if value.startswith("<b>"):
                marked.setdefault(column, []).append(number)
    assert marked == {c: [0 if better == "smaller" else 1] for c, better in BETTER.items()}
