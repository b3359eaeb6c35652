"""The page of a sweep: one figure of the loss against the swept setting, paired by seed."""

import re

import pytest

from l2r_lab.report.ablation import all_rows_table, seed_row
from l2r_lab.report.sweep import write_sweep_page
from l2r_lab.report.swept_settings import swept_figure, swept_table
from l2r_lab.report.verdicts import differences_from_first, judged_values
from tests.report.runs import made_run

NOISE = (0.0, 0.01, -0.01)


def swept(folder, losses, seeds=3, **settings):
    """A row per rank; seeds differ by 1 nat, ranks by what ``losses`` say and a hundredth."""
    rows = []
    for rank, loss in losses.items():
        runs = [
            made_run(
                folder / f"{rank}-{settings}.seed-{s}",
                seed=s,
                ce=5 + s + loss + (rank > 2) * NOISE[s],
            )
            for s in range(seeds)
        ]
        rows.append(seed_row({"router.rank": rank, **settings}, runs))
    return rows


def judged(rows):
    return judged_values({row.label: row.runs for row in rows})


def test_bars_are_the_paired_intervals_and_not_the_spread_of_seeds(tmp_path):
    rows = swept(tmp_path, {2: 0.0, 16: -0.2, 4: -0.1})
    found = judged(rows)
    figure, key = swept_figure(rows, found)
    (line,) = figure.data
    assert list(line.x) == ["2", "16", "4"] and figure.layout.xaxis.categoryarray == (
        "2",
        "4",
        "16",
    )
    assert list(line.y) == pytest.approx([6.0, 5.8, 5.9])
    gaps = differences_from_first(found.values)
    assert line.error_y.array == pytest.approx([0, gaps["rank 16"].half, gaps["rank 4"].half])
    assert line.error_y.array[1] < 0.06  # seeds differ by 1
    assert "paired over 3 seeds" in key.entries[1][1] and "rank 2" in key.entries[0][1]
    table = swept_table(rows, found)
    assert table.columns[-1] == "difference from rank 2 [95%]" and table.rows[0][-1] == "-"
    assert table.rows[1][-1].startswith("-0.200 [-0.2") and "(Bonferroni)" in table.caption


def test_one_seed_has_points_and_no_intervals(tmp_path):
    rows = swept(tmp_path, {2: 0.0, 4: -0.1}, seeds=1)
    (figure,) = swept_figure(rows, judged(rows))
    assert list(figure.data[0].error_y.array) == [0.0, 0.0]
    assert len(swept_table(rows, judged(rows)).columns) == 3


def test_a_second_setting_is_a_line_of_its_own(tmp_path):
    rows = [
        *swept(tmp_path, {2: 0.0, 4: -0.1}, heads=1),
        *swept(tmp_path, {2: 0.1, 4: 0.0}, heads=4),
    ]
    figure, _ = swept_figure(rows, judged(rows))
    assert [(line.name, tuple(line.x)) for line in figure.data] == [
        ("heads 1", ("2", "4")), ("heads 4", ("2", "4")),
    ]  # fmt: skip


def test_a_list_and_the_budget_can_be_swept(tmp_path):
    betas = [
        seed_row({"optimizer.betas": b}, [made_run(tmp_path / str(b))]) for b in ([0.9], [0.8])
    ]
    page = write_sweep_page(betas, tmp_path / "betas.html", failed={}).read_text()
    assert "One seed ranks nothing" in page and "[0.8]" in page
    steps = [
        seed_row({"training.steps": n}, [made_run(tmp_path / f"{n}", steps=n)]) for n in (60, 120)
    ]
    page = write_sweep_page(steps, tmp_path / "steps.html", failed={}).read_text()
    assert "One seed ranks nothing" in page and "nothing is compared" not in page


def test_nothing_stands_twice_and_accuracies_are_named_where_there_are_some(tmp_path):
    rows = swept(tmp_path, {2: 0.0, 4: -0.1})
    text = write_sweep_page(rows, tmp_path / "page.html", failed={}).read_text()
    body = text[text.index("<h1") :]
    assert "Accuracies" not in body and "Downstream tasks" not in body
    heads = re.findall(r"<thead>(.*?)</thead>", body)
    assert len(heads) == len(set(heads)) and body.count("Training cross-entropy") == 1
    assert (
        body.index("class='verdict'")
        < body.index("paired over 3 seeds")
        < body.index("class='cannot'")
    )
    assert "Accuracies" not in all_rows_table(rows).caption
    seen = seed_row(
        {"router.rank": 2}, [made_run(tmp_path / "v", validation=lambda _: {"top1": 0.5})]
    )
    assert "Accuracies in per cent" in all_rows_table([seen]).caption
