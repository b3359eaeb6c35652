"""``l2r eval`` on a checkpoint folder and on a run folder."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest
from transformers import OlmoeForCausalLM

from l2r_lab.training.evaluation.task_scoring import ScoredDocument, TaskResult

RESULTS = Path("evaluation") / "model"  # in the working folder, by the checkpoint's name


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_row_is_printed_and_written_and_a_second_run_reuses_it(l2r, checkpoint):
    code, out, err = l2r("eval", checkpoint, "--tasks", "piqa,boolq", "--limit", 3)
    assert code == 0, err
    assert out.startswith("model: ") and "95% from" in out and "more column" not in out
    assert "boolq: " in err and "contexts cut to the model's length" in err
    written = json.loads((RESULTS / "evaluation.json").read_text())
    assert written["tasks"]["piqa"]["documents"] == 3
    assert written["accuracy"]["PIQA"] == pytest.approx(100 * written["tasks"]["piqa"]["accuracy"])
    assert written["accuracy"]["Overall"] is None
    assert written["chance"]["PIQA"] == 50 and written["chance"]["Overall"] == 31.25

    stored = RESULTS / "evaluation" / "piqa.json"
    before = stored.stat().st_mtime_ns
    again = l2r("eval", checkpoint, "--tasks", "piqa,boolq", "--limit", 3, "--json")
    row = json.loads(again.out)[0]
    assert {"Hum", "SocSci", "BoolQ", "HSwag", "Overall"} <= set(row)
    assert row["PIQA"] == written["accuracy"]["PIQA"]
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
        for name in ("model", "other"):
            path = RESULTS.with_name(name) / "evaluation" / f"{task}.documents.jsonl"
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
    kept = RESULTS / "evaluation" / "piqa.documents.jsonl"
    before = kept.read_bytes()
    kept.unlink()
    again = l2r("eval", checkpoint, other, "--tasks", "piqa,boolq", "--limit", 12, "--json")
    assert json.loads(again.out) == rows and kept.read_bytes() == before


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_what_a_changed_tokenizer_or_configuration_scored_is_not_reused(l2r, checkpoint, file):
    command = ("eval", checkpoint, "--tasks", "piqa", "--limit", 3)
    assert l2r(*command).code == 0
    stored, path = RESULTS / "evaluation" / "piqa.json", checkpoint / file
    before, times = stored.stat().st_mtime_ns, path.stat()
    path.write_text(path.read_text() + " ")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert l2r(*command).code == 0
    assert stored.stat().st_mtime_ns != before


def test_a_card_or_an_earlier_result_changes_no_scores(l2r, checkpoint):
    command = ("eval", checkpoint, "--tasks", "piqa", "--limit", 3)
    assert l2r(*command).code == 0
    stored = RESULTS / "evaluation" / "piqa.json"
    before = stored.stat().st_mtime_ns
    (checkpoint / "README.md").write_text("# Mine")
    (RESULTS / "evaluation.json").unlink()
    assert l2r(*command).code == 0
    assert stored.stat().st_mtime_ns == before


@pytest.mark.parametrize("right", [0, 10])
def test_none_or_all_of_ten_right_is_not_certain(l2r, checkpoint, monkeypatch, right):
    def score(model, read, **options):
        scored = tuple(ScoredDocument(n, 0, (float(right), 1.0)) for n in range(10))
        return {"piqa": TaskResult("piqa", right / 10, 0.0, right / 10, 10, 0, scored)}

    monkeypatch.setattr("l2r_lab.training.evaluation.whole_checkpoint.score_tasks", score)
    code, out, err = l2r("eval", checkpoint, "--tasks", "piqa", "--json")
    assert code == 0, err
    share, low, high = (row["PIQA"] for row in json.loads(out))
    theirs = binomtest(right, 10).proportion_ci(0.95, "wilson")
    assert share == 10 * right
    assert (low, high) == pytest.approx((100 * theirs.low, 100 * theirs.high), abs=1e-9)
    written = json.loads((RESULTS / "evaluation.json").read_text())
    assert written["interval"]["PIQA"] == [low, high] and written["interval"]["SciQ"] is None


def test_several_checkpoints_need_folders_of_their_own(l2r, checkpoint, tmp_path):
    for arguments, message in (
        ((checkpoint, tmp_path, "--out", tmp_path / "x"), "out is for one checkpoint; got"),
        ((checkpoint, checkpoint), "checkpoints must differ"),
    ):
        assert message in l2r("eval", *arguments).refusal()


def test_results_can_go_elsewhere(l2r, checkpoint, tmp_path):
    l2r("eval", checkpoint, "--tasks", "piqa", "--limit", 2, "--out", tmp_path / "results")
    assert (tmp_path / "results" / "evaluation.json").is_file() and not RESULTS.exists()


def test_a_folder_of_weights_stays_as_it_is(l2r, checkpoint, text):
    before = sorted(checkpoint.rglob("*"))
    assert l2r("eval", checkpoint, "--tasks", "piqa", "--limit", 1).code == 0
    assert l2r("eval", checkpoint, "--data", text[0]).code == 0
    assert sorted(checkpoint.rglob("*")) == before
    assert {path.name for path in RESULTS.iterdir()} == {"evaluation", "evaluation.json"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "winogrande"], "tasks must be among"),
        (["--split", "train"], "split must be val or test"),
        (["--dtype", "int8"], "dtype must be one of auto"),
        (["--limit", "0"], "limit must be >= 1"),
        (["--average"], "--average is for an image classifier; "),
    ],
)
def test_bad_options_are_one_value_error(l2r, checkpoint, arguments, message):
    assert message in l2r("eval", checkpoint, *arguments).refusal()


def test_folder_without_checkpoint_is_refused(l2r, tmp_path):
    assert "checkpoint must be a folder with config.json" in l2r("eval", tmp_path).refusal()


@pytest.fixture
def text(tmp_path):
    for name, words in (("a", "yes or no "), ("b", "what is 7 times 6? ")):
        (tmp_path / f"{name}.txt").write_text(words * 8)
    return [tmp_path / "a.txt", tmp_path / "b.txt"]


def test_loss_on_text_is_printed_by_file_and_in_all_and_kept(l2r, checkpoint, text):
    command = ("eval", checkpoint, "--data", text[0], "--data", text[1])
    code, out, err = l2r(*command)
    assert code == 0, err
    for word in ("a.txt", "b.txt", "in all", "perplexity", "bits/byte"):
        assert word in out
    (written,) = (RESULTS / "evaluation").glob("text-*.json")
    assert f"wrote {written}" in err
    rows = json.loads(l2r(*command, "--json").out)
    numbers = json.loads(written.read_text())["texts"]
    assert [row["Text"] for row in rows] == ["a.txt", "b.txt", "in all"] == list(numbers)
    for row in rows:
        bits = numbers[row["Text"]]["bits_per_byte"]
        assert (row["bits/byte"], row["standard error"]) == (bits["value"], bits["error"])
        assert (row["95% from"], row["95% to"]) == (bits["low"], bits["high"])
    assert rows[2]["bytes"] == sum(path.stat().st_size for path in text)
    alone = json.loads(l2r("eval", checkpoint, "--data", text[0], "--json").out)
    assert [row["Text"] for row in alone] == ["a.txt", "in all"]
    assert alone[0]["bits/byte"] == pytest.approx(rows[0]["bits/byte"])
    assert "in all" not in l2r("eval", checkpoint, "--data", text[0]).out


def test_two_checkpoints_are_compared_on_text_in_bits_where_tokens_differ(
    l2r, checkpoint, text, tmp_path
):
    other, retokenized = tmp_path / "other", tmp_path / "retokenized"
    shutil.copytree(checkpoint, other)
    model = OlmoeForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    model.save_pretrained(other)
    shutil.copytree(other, retokenized)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = []
    (retokenized / "tokenizer.json").write_text(json.dumps(tokenizer))
    command = ("eval", checkpoint, other, retokenized, "--data", tmp_path / "a.txt", "--json")
    code, out, err = l2r(*command)
    assert code == 0, err
    rows = [row for row in json.loads(out) if row["Text"] == "in all"]
    names = ["model", "other", "retokenized", "other - model", "retokenized - model"]
    assert [row["Model"] for row in rows] == names
    for position in (1, 2):
        gap = rows[position]["bits/byte"] - rows[0]["bits/byte"]
        assert rows[position + 2]["bits/byte"] == pytest.approx(gap)
    assert rows[3]["nats/token"] == pytest.approx(rows[1]["nats/token"] - rows[0]["nats/token"])
    assert rows[4]["nats/token"] is None
    assert "are not comparable" in " ".join(l2r(*command[:-1]).out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "missing"], "--data must be a file or a folder"),
        (["--stride", "4"], "--stride is for text; give --data or --text too"),
        (["--data", "a.txt", "--tasks", "piqa"], "--tasks is for tasks; leave it out with --data"),
        (["b.txt", "--data", "a.txt"], "every file needs its own --data; got "),
        (["--data", "a.txt", "--length", "4", "--stride", "4"], "stride must lie between 1 and 3"),
        (["--data", "a.txt", "--limit", "0"], "limit must be >= 1"),
        (["--data", "a.txt", "--batch-size", "0"], "--batch-size must be >= 1"),
        (["--data", "empty.jsonl"], "--data must not be empty; got empty.jsonl"),
        (["--data", "latin1.txt"], "--data latin1.txt must be UTF-8; it has byte 0xe9 at 3"),
        (["--data", "none"], "--data folder none must hold text files"),
        (["--text", ""], "--text must not be empty"),
        (["--text", "a cat", "--data", "a.txt"], "--text must be given without --data"),
        (["--data", "digits"], "--data must be text for a language model; got digits"),
    ],
)
def test_what_does_not_fit_text_is_one_line(
    l2r, checkpoint, text, monkeypatch, arguments, message, tmp_path
):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "none").mkdir()
    monkeypatch.chdir(tmp_path)
    assert message in l2r("eval", checkpoint, *arguments).refusal()


def test_text_needs_a_tokenizer(l2r, checkpoint, text):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    assert "the checkpoint has no tokenizer" in l2r("eval", checkpoint, "--data", text[0]).refusal()
