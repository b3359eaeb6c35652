"""results/evidence/README.md: tables are what the results come to; sections are replaced alone."""

import json
import re

import numpy as np
import pytest
from scipy import stats

from scripts.pages import families_page, needed_rank, routers_by_experts
from scripts.pages.marks import section_of, with_section

ROUTERS = section_of(
    routers_by_experts.PAGE.read_text(encoding="utf-8"), routers_by_experts.SECTION
).splitlines()


def test_the_section_is_replaced_and_the_page_around_it_stays():
    text = families_page.PAGE.read_text(encoding="utf-8")
    new = with_section(text, families_page.SECTION, "none\n")
    old = section_of(text, families_page.SECTION)
    assert section_of(new, families_page.SECTION) == "none\n" and new.count(old) == 0
    assert with_section(new, families_page.SECTION, old) == text


def test_a_page_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="<!-- families -->"):
        with_section("no marks\n", "families", "none\n")
    with pytest.raises(ValueError, match="<!-- end of families -->"):
        with_section("<!-- families -->\n", "families", "none\n")


@pytest.mark.slow("reads and judges every study")
def test_the_table_is_what_the_results_come_to():
    table = routers_by_experts.table(list(routers_by_experts.all_arms()))
    assert table.splitlines() == ROUTERS


def test_a_row_is_computed_independently():
    name, arm, linear = "rivals-256", "sigmoid-loss-free", "linear"
    path = routers_by_experts.ROOT / "results" / "evidence" / name / "results.jsonl"
    runs = [r for r in map(json.loads, path.read_text().splitlines()) if "arm" in r]
    runs.sort(key=lambda run: run["seed"])
    own, base = (
        np.array([r["trained"]["validation_ce"] for r in runs if r["arm"] == name])
        for name in (arm, linear)
    )
    gaps = own - base
    low, high = stats.t.interval(0.95, len(gaps) - 1, gaps.mean(), stats.sem(gaps))
    row = next(line for line in ROUTERS if "| sigmoid, loss-free |" in line)
    numbers = [float(n) for n in re.findall(r"[-+]?\d+\.\d{3}", row)]
    expected = [own.mean(), gaps.mean(), (high - low) / 2]
    assert numbers == pytest.approx(expected, abs=6e-4)
    assert "worse" in row


def test_a_pair_that_the_plan_does_not_contrast_has_no_verdict():
    study = routers_by_experts.study_in_results("rivals-256")
    arms = {arm.router: arm for arm in routers_by_experts.arms_of("rivals-256", study)}
    assert arms["linear"].gap is None and arms["linear"].verdict == ""
    assert arms["L2R, rank 8"].verdict == "no gain above 0.053, no loss above 0.032"
    keys = arms["product keys, 8 numbers"]
    assert keys.verdict == "not in the plan" and keys.gap.mean == pytest.approx(0.246, abs=5e-4)


def test_the_figure_has_a_point_per_router_and_none_for_linear_or_its_balance():
    study = routers_by_experts.study_in_results("rivals-256")
    arms = list(routers_by_experts.arms_of("rivals-256", study))
    points = routers_by_experts.figure(arms).data
    assert [point.text[0].partition(": ")[2] for point in points] == [
        "L2R, rank 8",
        "product keys, 16 numbers",
        "product keys, 8 numbers",
        "sigmoid, loss-free",
    ]
    assert points[0].x[0] == pytest.approx(12_800 / 131_072)
    assert points[0].y[0] == arms[1].gap.mean


@pytest.mark.slow("reads and judges three studies")
def test_the_table_of_ranks_is_what_the_results_come_to():
    page = needed_rank.PAGE.read_text(encoding="utf-8")
    ranks = needed_rank.ranks()
    assert section_of(page, needed_rank.SECTION) == needed_rank.table(ranks)
    thousand = ranks[-1]
    assert (thousand.experts, thousand.needed) == (1024, 16)
    path = routers_by_experts.STORED
    losses = [
        run["trained"]["validation_ce"]
        for name in ("experts-1024", "rivals-1024")
        for run in map(json.loads, (path / name / "results.jsonl").read_text().splitlines())
        if run.get("arm") in ("l2r-rank-32",) and run["seed"] in (1200, 1201)
    ]
    assert thousand.losses[32] == pytest.approx(np.mean(losses)) and len(losses) == 2


def test_the_needed_rank_is_the_least_within_the_margin_of_rank_64():
    losses = {2: 5.0, 8: 4.83, 16: 4.819, 32: 4.7, 64: 4.8}
    one = needed_rank.Ranks(16, losses, 4.9, dict.fromkeys(losses, 100), 1000)
    assert one.needed == 16
    assert "| 16 | 5.000 | 4.830 | 4.819 | 4.700 | 4.800 | 4.900 | 16 |" in needed_rank.table([one])
    assert needed_rank.figure([one]).data[1].y == (16,)
