"""References of the numbers: those of the committed runs, alike on the page and in the docs."""

import json
from pathlib import Path

import pytest

from l2r.report.references import REFERENCES, RUNS, health_table, reference_table
from tests.report.pages import made_diagnosis

ROOT = Path(__file__).parents[2]
OURS = {row.number: row.runs for row in REFERENCES}


def trained(*studies):
    """Numbers of every run of the studies, by arm."""
    found = {}
    for study in studies:
        for line in (ROOT / "results/evidence" / study / "results.jsonl").read_text().splitlines():
            record = json.loads(line)
            if "arm" in record:
                found.setdefault(record["arm"], []).append(record["trained"])
    return found


@pytest.mark.parametrize(
    ("number", "field", "form"),
    [
        ("load entropy", "load_entropy", "{:.3f} to {:.3f}"),
        ("max / mean", "max_over_mean", "{:.2f} to {:.2f}"),
        ("routing gain", "routing_gain", "{:.2f} to {:.2f} nats"),
        ("margin / spread", "scale_free_margin", "{:.2f} to {:.2f}"),
        ("stability", "stability", "{:.3f} to {:.3f}"),
        ("top-k overlap", "topk_overlap", "{:.3f} to {:.3f}"),
    ],
)
def test_ranges_are_those_of_the_sixty_committed_runs(number, field, form):
    values = [run[field] for runs in trained("decision").values() for run in runs]
    assert len(values) == 60
    assert OURS[number] == form.format(min(values), max(values))


def test_counts_and_flips_are_those_of_the_committed_runs():
    arms = trained("decision")
    peaks = [run["max_over_mean"] - 1 for runs in arms.values() for run in runs]
    assert OURS["MaxVio"] == f"{min(peaks):.2f} to {max(peaks):.2f}"
    dead = [run["dead_experts"] for runs in arms.values() for run in runs]
    assert sorted(dead)[-2:] == [0, 1 / 4]  # a mean of four layers
    assert OURS["dead experts"] == "0; 1 in one layer of one run"
    first = {arm: [run["first_experts"] for run in runs] for arm, runs in arms.items()}
    published = first.pop("l2r")
    assert {value for values in first.values() for value in values} == {16}
    assert OURS["experts ever first"] == (
        f"all 16; about {sum(published) / len(published):.0f} with L2R as published"
    )
    flips = trained("flips", "flips-decision")
    told = {
        "linear": ("linear", "linear-tuned"),
        "L2R tuned": ("l2r-sips-tuned", "l2r-tuned"),
        "L2R as published": ("l2r-sips", "l2r-paper"),
    }
    spans, count = [], 0
    for name, names in told.items():
        shares = [100 * run["flipped_tokens"] for arm in names for run in flips[arm]]
        count += len(shares)
        spans.append(f"{min(shares):.1f}% to {max(shares):.1f}% {name}")
    assert OURS["tokens that change experts in bf16"] == ", ".join(spans)
    assert f"in bf16 {count} of" in RUNS


def test_the_docs_show_the_same_table():
    docs = (ROOT / "docs/diagnostics.md").read_text()
    assert reference_table().to_markdown() in docs and RUNS in docs.replace("\n", " ")


def diagnosis(seed, first):
    made = made_diagnosis(seed)
    for layer, row in enumerate(made.layers):
        row["first_experts"] = float(first + layer)
    return made


def test_numbers_stand_beside_their_references_with_whole_counts():
    table = health_table({"a": diagnosis(0, 4), "b": diagnosis(1, 5)})
    rows = {row["number"]: row for row in table.records()}
    assert rows["experts ever first"]["a"] == "4 to 5" and rows["routing gain"]["a"] == 0.12
    assert rows["routing gain"]["even or unchanged"] == "0: random experts"
    assert "dead experts" not in rows  # not measured here
    assert table.digits == 3


def test_of_many_checkpoints_the_least_and_the_most_are_named():
    views = {f"run {n}": diagnosis(n, n + 1) for n in range(5)}
    table = health_table(views)
    rows = {row["number"]: row for row in table.records()}
    assert rows["experts ever first"]["least"] == "1 to 2 (run 0)"
    assert rows["experts ever first"]["most"] == "5 to 6 (run 4)"
    assert len(table.columns) <= 8 and len(health_table(dict(list(views.items())[:4])).columns) == 8
