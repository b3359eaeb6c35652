"""From the command to the page: the vision demo with two seeds."""

import json
import shutil

import pytest
from scipy.stats import binomtest

from l2r.files.folder import RunFolder
from l2r.files.shapes import misshapen
from l2r.stats.intervals import mean_interval
from l2r_lab.report.paper_tables import accuracy_table

SHORT = [
    "training.steps=4",
    "training.global_batch=16",
    "training.micro_batch=16",
    "evaluation.every=2",
    "evaluation.batch_size=30",
    "evaluation.max_batches=2",
    "checkpoint.every=2",
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.intermediate_size=32",
    "model.moe_layers=[1]",
]


@pytest.fixture(scope="module")
def compared(l2r, tmp_path_factory):
    root = tmp_path_factory.mktemp("compare") / "runs"
    command = ["compare", "demo-vision", *SHORT, "--routers", "linear,l2r_sips"]
    code, out, err = l2r(*command, "--seeds", 2, "--out", root, "--json")
    assert code == 0, err
    return root, json.loads(out)


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
    for words in ("Top-1 and top-5 accuracy", "Which expert each patch goes to", "L2R (SIPS)"):
        assert words in page
    assert "Validation top-1 accuracy" in page and "images each" in page
    assert "seed-1</td>" not in page  # repeats have no row of their own
    assert (root / "linear" / "patches.npz").is_file()
    assert [*misshapen(RunFolder(root / "linear"))] == []
    assert not (root / "linear.seed-1" / "patches.npz").exists()


def test_report_command_reads_the_same_runs(l2r, compared, tmp_path):
    root, rows = compared
    page = tmp_path / "page.html"
    code, out, err = l2r("report", root, "--out", page, "--json")
    assert code == 0, err
    by_method = {row["Method"]: row for row in json.loads(out)}
    assert by_method == {row["Method"]: row for row in rows}
    assert "Patches and experts" in page.read_text(encoding="utf-8")


def test_two_runs_of_one_kind_of_router_are_no_seeds_of_each_other(l2r, compared, tmp_path):
    root, _ = compared
    for name in ("l2r_sips", "wide"):
        shutil.copytree(root / "l2r_sips", tmp_path / name)
    code, out, err = l2r("report", tmp_path, "--out", tmp_path / "page.html", "--json")
    assert code == 0, err
    assert [(row["Method"], row["seeds"]) for row in json.loads(out)] == [
        ("L2R (SIPS)", 1),
        ("wide", 1),
    ]


def test_one_seed_is_called_one_seed():
    table = accuracy_table({"linear": (mean_interval([50.0]), mean_interval([90.0]), 1)})
    assert table.rows == (("Linear", 50.0, None, 90.0, None, 1),)  # one seed has no interval
    assert "nothing without more seeds" in table.caption


def test_eval_gives_the_recorded_accuracy_or_that_of_other_images(l2r, compared, tmp_path):
    root, _ = compared
    code, out, err = l2r("eval", root / "linear", "--out", tmp_path, "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert rows[0]["images"] == 359 and rows[1]["Model"] == "95% from"
    hits = round(rows[0]["Top-1 (%)"] * 359 / 100)
    theirs = binomtest(hits, 359).proportion_ci(0.95, "wilson")
    assert [rows[1]["Top-1 (%)"], rows[2]["Top-1 (%)"]] == pytest.approx(
        [100 * theirs.low, 100 * theirs.high]
    )
    saved = json.loads((tmp_path / "evaluation.json").read_text())
    assert saved["top1"] == pytest.approx(json.loads(out)[0]["Top-1 (%)"] / 100)
    lines = (root / "linear" / "metrics.jsonl").read_text().splitlines()
    recorded = [r for r in map(json.loads, lines) if r["kind"] == "validation"][-1]
    code, out, err = l2r("eval", root / "linear", "--limit", 60, "--out", tmp_path, "--json")
    assert json.loads((tmp_path / "evaluation.json").read_text())["top1"] == recorded["top1"]
    model = root / "linear" / "model"
    code, out, err = l2r("eval", model, "--data", "digits", "--out", tmp_path, "--json")
    assert json.loads(out)[0]["images"] == 359


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["linear/model"], "is no run folder, so --data must name images"),
        (["linear", "--average"], "holds no averaged weights"),
        (["linear", "--split", "val"], "--split is for a language model; "),
        (["linear", "--length", "9"], "--length is for a language model; "),
        (["linear", "--data", "digit"], "--data must be a file or a folder that exists, digits"),
    ],
)
def test_eval_refuses_in_one_line(l2r, compared, options, words):
    root, _ = compared
    assert words in l2r("eval", root / options[0], *options[1:]).refusal()


def test_diagnose_reads_image_classifiers_and_draws_patches(l2r, compared, tmp_path):
    root, _ = compared
    command = ["diagnose", root / "linear", root / "l2r_sips", "--out", tmp_path]
    code, _, err = l2r(*command, "--instances", 40, "--sample", 64, "--certify", 0, "--json")
    assert code == 0, err
    assert (tmp_path / "index.html").is_file()
    assert "Which expert each patch goes to" in (tmp_path / "linear" / "patches.html").read_text()
    info = json.loads((tmp_path / "linear" / "diagnosis.json").read_text())["info"]
    assert info["tokens"] == 40 * 17  # 16 patches and the class token
    assert info["domains"] == [str(digit) for digit in range(10)]
    assert info["model"]["routing_gain"] != 0 and "cross_entropy" in info["model"]
    page = (tmp_path / "index.html").read_text()
    assert "Routing gain" in page and "Agreement of routers" in page and "Vocabulary" not in page


@pytest.mark.slow("a diagnosis per checkpoint")
def test_saturation_over_the_checkpoints_of_a_run(l2r, compared, tmp_path):
    root, _ = compared
    short = ["--instances", 20, "--sample", 64, "--certify", 0, "--gain", 0]
    code, _, err = l2r("diagnose", root / "linear", *short, "--over-time", "--out", tmp_path)
    assert code == 0, err
    info = json.loads((tmp_path / "linear" / "diagnosis.json").read_text())["info"]
    found = info["over_time"]
    assert found["checkpoints"] == [2, 4]  # the last is what was exported
    assert set(found["top1"][1]) == set(found["topk"][1]) == {1.0}
    assert all(0 < share < 1 for share in found["topk"][0])
    assert "routing_gain" not in info["model"]
    assert "Saturation of linear" in (tmp_path / "index.html").read_text()


def test_params_prints_the_whole_vit_for_every_router(l2r):
    rows = {row["router"]: row for row in json.loads(l2r("params", "--vit", "--json").out)}
    assert rows["dense"]["parameters"] == 22_050_664
    assert rows["linear"]["in routers"] == 4 * 16 * 384
    assert rows["l2r_sips"]["active"] == 26_780_528
