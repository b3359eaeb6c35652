"""``l2r eval`` on a checkpoint folder and on a run folder."""

import json
import os
import shutil

import pytest
import torch
from scipy.stats import binomtest
from transformers import OlmoeForCausalLM

from l2r.evaluation.scoring import ScoredDocument, TaskResult


def test_row_is_printed_and_written_and_a_second_run_reuses_it(l2r, checkpoint):
    code, out, err = l2r("eval", checkpoint, "--tasks", "piqa,boolq", "--limit", 3)
    assert code == 0, err
    for column in ("Hum", "SocSci", "BoolQ", "HSwag", "Overall", "95% from", "95% to"):
        assert column in out
    assert "boolq: " in err and "contexts cut to the model's length" in err
    written = json.loads((checkpoint / "evaluation.json").read_text())
    assert written["tasks"]["piqa"]["documents"] == 3
    assert written["accuracy"]["PIQA"] == pytest.approx(100 * written["tasks"]["piqa"]["accuracy"])
    assert written["accuracy"]["Overall"] is None

    stored = checkpoint / "evaluation" / "piqa.json"
    before = stored.stat().st_mtime_ns
    again = l2r("eval", checkpoint, "--tasks", "piqa,boolq", "--limit", 3, "--json")
    assert json.loads(again.out)[0]["PIQA"] == written["accuracy"]["PIQA"]
    assert stored.stat().st_mtime_ns == before  # nothing was scored again
    l2r("eval", checkpoint, "--tasks", "piqa", "--limit", 2)
    assert stored.stat().st_mtime_ns != before  # other settings


def test_run_folder_gets_its_evaluation_file(l2r, checkpoint):
    code, _, err = l2r(
        "eval", checkpoint.parent, "--tasks", "piqa", "--limit", 2
    )  # it holds model/
    assert code == 0, err
    assert (checkpoint.parent / "evaluation.json").is_file()


def test_two_checkpoints_are_compared_by_pairs_of_documents(l2r, checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    torch.manual_seed(2)
    model = OlmoeForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.5)
    model.save_pretrained(other)
    code, out, err = l2r(
        "eval", checkpoint, other, "--tasks", "piqa,boolq", "--limit", 12, "--json"
    )
    assert code == 0, err
    rows = json.loads(out)
    assert [row["Model"] for row in rows] == [
        "model", "95% from", "95% to", "other", "95% from", "95% to",
        "other - model", "95% from", "95% to",
    ]  # fmt: skip
    for task, column in (("piqa", "PIQA"), ("boolq", "BoolQ")):
        documents = []
        for folder in (checkpoint, other):
            path = folder / "evaluation" / f"{task}.documents.jsonl"
            settings, *lines = map(json.loads, path.read_text().splitlines())
            assert settings["limit"] == len(lines) == 12
            for line in lines:
                assert line["hit"] == (line["scores"].index(max(line["scores"])) == line["label"])
            documents.append({line["document"]: line["hit"] for line in lines})
        hits = [sum(d.values()) for d in documents]
        assert [rows[0][column], rows[3][column]] == pytest.approx([100 * n / 12 for n in hits])
        difference, low, high = (row[column] for row in rows[6:])
        assert difference == pytest.approx(100 * (hits[1] - hits[0]) / 12)
        assert low < difference < high
    assert rows[6]["Overall"] is None

    # Scored before documents were kept: the task is scored again, with the same result.
    kept = checkpoint / "evaluation" / "piqa.documents.jsonl"
    before = kept.read_bytes()
    kept.unlink()
    again = l2r("eval", checkpoint, other, "--tasks", "piqa,boolq", "--limit", 12, "--json")
    assert json.loads(again.out) == rows and kept.read_bytes() == before


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_what_a_changed_tokenizer_or_configuration_scored_is_not_reused(l2r, checkpoint, file):
    command = ("eval", checkpoint, "--tasks", "piqa", "--limit", 3)
    assert l2r(*command).code == 0
    stored, path = checkpoint / "evaluation" / "piqa.json", checkpoint / file
    before, times = stored.stat().st_mtime_ns, path.stat()
    path.write_text(path.read_text() + " ")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert l2r(*command).code == 0
    assert stored.stat().st_mtime_ns != before


def test_a_card_or_an_earlier_result_changes_no_scores(l2r, checkpoint):
    command = ("eval", checkpoint, "--tasks", "piqa", "--limit", 3)
    assert l2r(*command).code == 0
    stored = checkpoint / "evaluation" / "piqa.json"
    before = stored.stat().st_mtime_ns
    (checkpoint / "README.md").write_text("# Mine")
    (checkpoint / "evaluation.json").unlink()
    assert l2r(*command).code == 0
    assert stored.stat().st_mtime_ns == before


@pytest.mark.parametrize("right", [0, 10])
def test_none_or_all_of_ten_right_is_not_certain(l2r, checkpoint, monkeypatch, right):
    def evaluate(model, tokenizer, tasks, **options):
        scored = tuple(ScoredDocument(n, 0, (float(right), 1.0)) for n in range(10))
        return {"piqa": TaskResult("piqa", right / 10, 0.0, right / 10, 10, 0, scored)}

    monkeypatch.setattr("l2r.evaluation.checkpoint.evaluate_tasks", evaluate)
    code, out, err = l2r("eval", checkpoint, "--tasks", "piqa", "--json")
    assert code == 0, err
    share, low, high = (row["PIQA"] for row in json.loads(out))
    theirs = binomtest(right, 10).proportion_ci(0.95, "wilson")
    assert share == 10 * right
    assert (low, high) == pytest.approx((100 * theirs.low, 100 * theirs.high), abs=1e-9)
    written = json.loads((checkpoint / "evaluation.json").read_text())
    assert written["interval"]["PIQA"] == [low, high] and written["interval"]["SciQ"] is None


def test_several_checkpoints_need_folders_of_their_own(l2r, checkpoint, tmp_path):
    for arguments, message in (
        ((checkpoint, tmp_path, "--out", tmp_path / "x"), "out is for one checkpoint; got"),
        ((checkpoint, checkpoint), "checkpoints must differ"),
    ):
        assert message in l2r("eval", *arguments).refusal()


def test_results_can_go_elsewhere(l2r, checkpoint, tmp_path):
    l2r("eval", checkpoint, "--tasks", "piqa", "--limit", 2, "--out", tmp_path / "results")
    assert (tmp_path / "results" / "evaluation.json").is_file()
    assert not (checkpoint / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "winogrande"], "tasks must be among"),
        (["--split", "train"], "split must be val or test"),
        (["--dtype", "int8"], "dtype must be one of float32"),
        (["--limit", "0"], "limit must be >= 1"),
        (["--data", "digits"], "--data is for an image classifier; "),
        (["--average"], "--average is for an image classifier; "),
    ],
)
def test_bad_options_are_one_value_error(l2r, checkpoint, arguments, message):
    assert message in l2r("eval", checkpoint, *arguments).refusal()


def test_folder_without_checkpoint_is_refused(l2r, tmp_path):
    assert "checkpoint must be a folder with config.json" in l2r("eval", tmp_path).refusal()
