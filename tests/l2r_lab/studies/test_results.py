"""The studies in results/evidence: of the plans as they stand, and told as they are judged."""

from itertools import combinations
from pathlib import Path

import pytest

from l2r_lab.files.study import StudyResults
from l2r_lab.report.evidence import write_study
from l2r_lab.studies.judging import StudyPlaces, results_of, study_of
from l2r_lab.studies.registration import parse_plan, read_plan

RESULTS = Path(__file__).resolve().parents[3] / "results" / "evidence"
STUDIES = sorted(path.parent.name for path in RESULTS.glob("*/results.jsonl"))
CHOOSE = ("screen", "screen-proposed")
JUDGE = (
    "decision", "experts-64", "width-256", "experts-64-width-256", "digits", "fashion-mnist",
)  # fmt: skip


@pytest.mark.slow("every published study")
@pytest.mark.parametrize("name", STUDIES)
def test_results_are_of_the_plan_as_it_stands_and_the_page_is_what_they_come_to(name, tmp_path):
    registered = read_plan(name)
    cells = registered.plan.cells(registered.plan.seeds.most)
    places = StudyPlaces(RESULTS / name, tmp_path)
    found = results_of(registered, cells, places)
    assert len(found) == len(StudyResults(RESULTS / name).read())
    assert {result.plan["digest"] for result in found} == {registered.digest}
    assert all(result.plan["commit"] for result in found)  # of the plan, when the run began
    _, text = write_study(study_of(registered, found, places.ended()), tmp_path, tmp_path)
    new, kept = (lines_of(path) for path in (text, RESULTS / name / "report.md"))
    assert new == kept


def lines_of(page):
    """Without the line that names the commit, which a copy without git does not have."""
    return [line for line in page.read_text().splitlines() if not line.startswith("Plan ")]


def test_what_was_chosen_is_judged_on_seeds_that_chose_nothing_and_not_tuned_again():
    plans = {name: parse_plan(name) for name in (*CHOOSE, *JUDGE)}
    seeds = {n: {c.recipe.seed for c in p.cells(p.seeds.most)} for n, p in plans.items()}
    chose = set().union(*(seeds[name] for name in CHOOSE))
    assert all(not seeds[name] & chose for name in JUDGE)
    on_text = [name for name in JUDGE if plans[name].recipe == plans["decision"].recipe]
    assert on_text == list(JUDGE[:4])
    assert all(not seeds[one] & seeds[other] for one, other in combinations(on_text, 2))
    for name in JUDGE:
        for arm in ("linear-best", "l2r-best"):
            assert plans[name].arms[arm] == plans["decision"].arms[arm]
