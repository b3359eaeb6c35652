"""evaluate_tasks: all eight tasks, resuming, and the paper's row."""

import json
import math

import pytest
import torch

from l2r.files.reading import parse_json
from l2r_lab.training.evaluation import TaskSettings, downstream
from l2r_lab.training.evaluation.downstream import evaluate_tasks, model_length
from l2r_lab.training.evaluation.paper_rows import TASK_COLUMNS, TASKS_OF, paper_row
from l2r_lab.training.evaluation.store import TaskStore
from l2r_lab.training.evaluation.task_scoring import Request, ScoredDocument, TaskResult
from l2r_lab.training.evaluation.tasks import PAPER_TASKS, select_tasks


@pytest.fixture(scope="module")
def eight(model):
    """Results of all tasks on four documents each, and the progress that was reported."""
    model.train()
    seen = []
    results = evaluate_tasks(model, None, limit=4, on_progress=lambda *values: seen.append(values))
    assert model.training  # given back as it came
    model.eval()
    return results, seen


def test_all_eight_tasks_run_without_a_network(eight):
    results, seen = eight
    assert results["piqa"].truncated == 0  # its contexts are whole sentences, far below 2048
    assert list(results) == [task.name for task in PAPER_TASKS]
    assert all(result.documents == 4 for result in results.values())
    for task in PAPER_TASKS:
        mine = [values for values in seen if values[0] == task.name]
        assert mine[-1] == (task.name, 4 * task.answers, 4 * task.answers)


def test_row_has_the_papers_columns_and_means(eight):
    results, _ = eight
    row = paper_row(results)
    assert " ".join(row.accuracy) == "Hum Other SocSci STEM MMLU BoolQ HSwag PIQA SciQ Overall"
    values = {name: 100 * result.accuracy for name, result in results.items()}
    groups = [values[f"mmlu_{g}"] for g in ("humanities", "other", "social_sciences", "stem")]
    assert row.accuracy["MMLU"] == pytest.approx(sum(groups) / 4)
    assert row.accuracy["Overall"] == pytest.approx(sum(values.values()) / 8)
    errors = [100 * result.standard_error for result in results.values()]
    assert row.standard_error["Overall"] == pytest.approx(math.hypot(*errors) / 8)


def test_every_column_is_of_the_librarys_task_of_that_name():
    """By hand from Table 15 and the library's labels, not from the code."""
    names = {
        "Hum": "mmlu_humanities",
        "Other": "mmlu_other",
        "SocSci": "mmlu_social_sciences",
        "STEM": "mmlu_stem",
        "BoolQ": "boolq",
        "HSwag": "hellaswag",
        "PIQA": "piqa",
        "SciQ": "sciq",
    }
    assert {task.column: task.name for task in PAPER_TASKS} == names
    for task in PAPER_TASKS:
        many = "mc_5shot" in task.labels["val"]
        assert many == task.name.startswith("mmlu_")
        assert task.labels["val"] == task.name + ("_mc_5shot" if many else "")
        assert task.labels["test"] == task.labels["val"] + ("_test" if many else "")
        assert TASKS_OF[task.column] == (task,)
    assert [task.column for task in TASKS_OF["MMLU"]] == ["Hum", "Other", "SocSci", "STEM"]


def test_papers_own_rows_follow_the_mean_of_eight():
    """Table 14, first row: the means are of the eight printed numbers, to their rounding."""
    printed = [23.4, 30.1, 25.8, 19.1, 60.0, 40.6, 64.5, 68.8]
    results = {
        task.name: TaskResult(task.name, value / 100, 0.0, value / 100, 256, 0)
        for task, value in zip(PAPER_TASKS, printed, strict=True)
    }
    row = paper_row(results)
    assert f"{row.accuracy['MMLU']:.1f}" == "24.6"
    assert f"{row.accuracy['Overall']:.1f}" == "41.5"


def test_row_of_some_tasks_leaves_the_means_empty(eight):
    results, _ = eight
    row = paper_row({"piqa": results["piqa"]})
    assert row.accuracy["PIQA"] is not None
    assert [c for c in TASK_COLUMNS if row.accuracy[c] is not None] == ["PIQA"]


def test_batch_size_does_not_change_the_result(model):
    one = evaluate_tasks(model, None, "sciq", limit=5, batch_size=1)["sciq"]
    many = evaluate_tasks(model, None, "sciq", limit=5, batch_size=20)["sciq"]
    assert one.to_dict() == many.to_dict()
    assert [d.hit for d in one.scored] == [d.hit for d in many.scored]


def test_answers_longer_than_the_length_stay_whole(model):
    results = evaluate_tasks(model, None, "piqa", limit=6, max_length=4)
    assert results["piqa"].truncated == 12
    reader = downstream.task_tokenizer(None, vocab_size=50280)
    dataset = downstream.build_requests(select_tasks("piqa")[0], reader, limit=6, max_length=4)
    for sample in dataset.samples:
        assert sample["ctx_len"] == 1  # every answer is longer than four tokens
        assert sample["query"] == [sample["ctx"][-1], *sample["continuation"][:-1]]


def test_answers_of_one_token_share_one_forward_pass(model, monkeypatch):
    rows, forward = [], model.forward

    def count(input_ids, **options):
        rows.append(len(input_ids))
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "forward", count)
    evaluate_tasks(model, None, "mmlu_stem,boolq", limit=5, batch_size=3)
    assert rows == [3, 2, 3, 2]  # not 4 and 2 answers times 5


def test_small_vocabulary_model_uses_its_own_tokenizer(checkpoint):
    from l2r.hf.checkpoints import load_causal_lm

    model, tokenizer = load_causal_lm(checkpoint)
    results = evaluate_tasks(model, tokenizer, "boolq,piqa", limit=4)
    assert results["boolq"].truncated > 0  # 256 positions are too few for its passages
    with pytest.raises(ValueError, match="the checkpoint has no tokenizer"):
        evaluate_tasks(model, None, "piqa", limit=1)


def test_requests_limit_counts_answers_as_the_paper_seems_to(model):
    results = evaluate_tasks(model, None, "piqa,sciq", requests=8)
    assert (results["piqa"].documents, results["sciq"].documents) == (4, 2)


def test_test_split_is_another_set_of_mmlu(model):
    store = {}
    for split in ("val", "test"):
        store[split] = downstream.build_requests(
            select_tasks("mmlu_stem")[0],
            downstream.task_tokenizer(None, vocab_size=50280),
            split=split,
            limit=2,
        ).samples
    assert store["val"][0]["ctx"] != store["test"][0]["ctx"]


class _KilledError(Exception):
    pass


def test_killed_evaluation_goes_on_where_it_stopped(model, tmp_path, monkeypatch):
    calls, kill_at, score = [], [0], downstream.score_batch

    def count(model, batch, metric_type):
        calls.append(len(batch["doc_id"]))
        if len(calls) == kill_at[0]:
            raise _KilledError
        return score(model, batch, metric_type)

    monkeypatch.setattr(downstream, "score_batch", count)
    whole = evaluate_tasks(model, None, "piqa,sciq", limit=6, batch_size=4)
    batches, kill_at[0] = calls.copy(), 5  # piqa has three batches: the kill is in sciq's second
    assert batches[:3] == [4, 4, 4]
    calls.clear()
    store = TaskStore(tmp_path, {"limit": 6})
    options = {"limit": 6, "batch_size": 4, "store": store}
    with pytest.raises(_KilledError):
        evaluate_tasks(model, None, "piqa,sciq", **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "piqa.documents.jsonl",
        "piqa.json",
        "sciq.partial.jsonl",
    ]
    # A crash may also cut the last line.
    partial = tmp_path / "sciq.partial.jsonl"
    partial.write_text(partial.read_text() + "[[1, 2, 3, -0.5")
    assert evaluate_tasks(model, None, "piqa,sciq", **options) == whole
    assert calls == batches[:5] + batches[4:]  # only the batch that was lost is scored again
    assert evaluate_tasks(model, None, "piqa,sciq", **options) == whole
    assert len(calls) == len(batches) + 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "piqa.documents.jsonl",
        "piqa.json",
        "sciq.documents.jsonl",
        "sciq.json",
    ]


def test_results_of_other_settings_are_not_reused(tmp_path):
    result = TaskResult("piqa", 0.5, 0.1, 0.5, 4, 0)
    old, new = TaskStore(tmp_path, {"weights": "a"}), TaskStore(tmp_path, {"weights": "b"})
    old.finish("piqa", result)
    assert (old.finished("piqa"), new.finished("piqa")) == (result, None)
    old.resume("sciq")
    old.add("sciq", [Request(0, 0, 3, -1.0, -2.0)])
    assert old.resume("sciq") == [Request(0, 0, 3, -1.0, -2.0)]
    assert new.resume("sciq") == []
    assert json.loads((tmp_path / "sciq.partial.jsonl").read_text()) == {"weights": "b"}


def test_documents_are_json_where_an_answer_is_impossible(tmp_path):
    """The logarithm of 0 is no JSON; a file with -Infinity stopped other programs."""
    scored = (ScoredDocument(0, 1, (-math.inf, -2.0)),)
    result = TaskResult("piqa", 1.0, math.nan, 1.0, 1, 0, scored)
    TaskStore(tmp_path, {}).finish("piqa", result)
    _, line = (tmp_path / "piqa.documents.jsonl").read_bytes().splitlines()
    assert parse_json(line)["scores"] == [None, -2.0]
    assert TaskStore(tmp_path, {}).finished("piqa").scored == scored


def test_length_is_2048_or_the_models_own(model):
    assert model_length(model.config) == 2048
    short = type(model.config)(max_position_embeddings=512)
    assert model_length(short) == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "piqua"}, r"tasks must be among .*; got 'piqua' \(did you mean 'piqa'\?\)"),
        ({"tasks": "piqa", "limit": 0}, "limit must be >= 1; got 0"),
        ({"tasks": "piqa", "batch_size": 0}, "batch_size must be >= 1; got 0"),
        ({"tasks": "piqa", "max_length": 0}, "max_length must be >= 1; got 0"),
        ({"tasks": "piqa", "limit": 2, "requests": 4}, "give limit or requests, not both"),
        ({"tasks": "sciq", "requests": 3}, "requests must be >= 4 for sciq; got 3"),
    ],
)
def test_bad_options_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate_tasks(model, None, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "train"}, "split must be val or test; got 'train'"),
        ({"limit": 0}, "limit must be >= 1; got 0"),
        ({"requests": -1}, "requests must be >= 1; got -1"),
        ({"max_length": 0}, "length must be >= 1; got 0"),
        ({"limit": 2, "requests": 4}, "give limit or requests, not both"),
    ],
)
def test_bad_settings_are_refused_before_a_checkpoint_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        TaskSettings(**options)


def test_broken_model_is_named_not_scored(model):
    class Broken(torch.nn.Module):
        config = model.config

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, use_cache=False):
            class Output:
                logits = torch.full((*input_ids.shape, 50280), math.nan)

            return Output

    with pytest.raises(ValueError, match="that are not numbers on task piqa"):
        evaluate_tasks(Broken(), None, "piqa", limit=1)
