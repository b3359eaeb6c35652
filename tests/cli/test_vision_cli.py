"""From the command to the page: the vision demo with two seeds."""

import json

import pytest
from typer.testing import CliRunner

from l2r.cli.app import build_app
from l2r.report.accuracy import accuracy_table

SHORT = [
    "training.steps=4",
    "training.global_batch=16",
    "training.micro_batch=16",
    "evaluation.every=2",
    "evaluation.batch_size=30",
    "evaluation.max_batches=2",
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare") / "runs"
    command = ["compare", "demo-vision", *SHORT, "--routers", "linear,l2r_sips"]
    result = CliRunner().invoke(
        build_app(), [*command, "--seeds", "2", "--out", str(root), "--json"]
    )
    assert result.exit_code == 0, result.output
    return root, json.loads(result.stdout)


def test_table_has_the_papers_layout_and_the_mean_over_seeds(compared):
    root, rows = compared
    assert [row["Method"] for row in rows] == ["Linear", "L2R (SIPS)"]
    for row, kind in zip(rows, ("linear", "l2r_sips"), strict=True):
        last = []
        for name in (kind, f"{kind}.seed-1"):
            lines = (root / name / "metrics.jsonl").read_text().splitlines()
            last.append([r for r in map(json.loads, lines) if r["kind"] == "validation"][-1])
        for column, field in (("Top-1 (%)", "top1"), ("Top-5 (%)", "top5")):
            first, second = (100 * record[field] for record in last)
            assert row[column] == pytest.approx((first + second) / 2)
            # Student's t with one degree of freedom; the deviation of two values is their gap.
            half = 12.7062 * abs(first - second) / 2
            assert row[f"± {column[:5].lower()}"] == pytest.approx(half, abs=1e-9)
        assert row["seeds"] == 2


def test_page_shows_accuracy_patches_and_curves_once_per_router(compared):
    root, _ = compared
    page = (root / "report.html").read_text(encoding="utf-8")
    for words in ("Top-1 and top-5 accuracy", "Patches and experts: linear", "L2R (SIPS)"):
        assert words in page
    assert "Validation top-1 accuracy" in page and "images each" in page
    assert "seed-1</td>" not in page  # repeats have no row of their own
    assert (root / "linear" / "patches.npz").is_file()
    assert not (root / "linear.seed-1" / "patches.npz").exists()


def test_report_command_reads_the_same_runs(compared, tmp_path):
    root, rows = compared
    page = tmp_path / "page.html"
    result = CliRunner().invoke(build_app(), ["report", str(root), "--out", str(page), "--json"])
    assert result.exit_code == 0, result.output
    by_method = {row["Method"]: row for row in json.loads(result.stdout)}
    assert by_method == {row["Method"]: row for row in rows}
    assert "Patches and experts: l2r_sips" in page.read_text(encoding="utf-8")


def test_one_seed_is_called_one_seed():
    table = accuracy_table({"linear": ((50.0, 0.0), (90.0, 0.0), 1)})
    assert "nothing without more seeds" in table.caption
    assert table.rows == (("Linear", 50.0, 0.0, 90.0, 0.0, 1),)
