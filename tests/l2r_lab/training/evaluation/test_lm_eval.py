"""Agreement with lm-evaluation-harness on local JSONL copies of PIQA and BoolQ."""

import json

import pytest

from l2r_lab.training.evaluation.downstream import evaluate_tasks
from l2r_lab.training.evaluation.task_tokenizers import task_tokenizer
from l2r_lab.training.evaluation.tasks import build_requests, select_tasks

DOCUMENTS = 24
TASKS = {
    "piqa": {
        "doc_to_text": "Question: {{goal}}\nAnswer:",
        "doc_to_choice": "{{[sol1, sol2]}}",
        "doc_to_target": "label",
        "fields": ("goal", "sol1", "sol2", "label"),
    },
    "boolq": {
        "doc_to_text": "{{passage}}\nQuestion: {{question}}?\nAnswer:",
        "doc_to_choice": ["yes", "no"],
        "doc_to_target": "{{0 if answer else 1}}",
        "fields": ("passage", "question", "answer"),
    },
}


@pytest.fixture(scope="module")
def harness(model, olmoe_tokenizer, tmp_path_factory):
    """Results of lm-evaluation-harness on the first documents of both tasks."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("lm_eval")
    reader = task_tokenizer(None, vocab_size=50280)
    for name, entry in TASKS.items():
        (task,) = select_tasks(name)
        rows = build_requests(task, reader, limit=DOCUMENTS).dataset
        lines = [json.dumps({field: row[field] for field in entry["fields"]}) for row in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        config = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
            "test_split": "test",
            "output_type": "multiple_choice",
            **{key: value for key, value in entry.items() if key.startswith("doc_to")},
            "metric_list": [
                {"metric": m, "aggregation": "mean", "higher_is_better": True}
                for m in ("acc", "acc_norm")
            ],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    language_model = HFLM(
        pretrained=model, tokenizer=olmoe_tokenizer, batch_size=8, max_length=2048
    )
    return simple_evaluate(
        language_model,
        tasks=[f"local_{name}" for name in TASKS],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=1,
        log_samples=True,
    )


@pytest.mark.slow("another program")
@pytest.mark.parametrize(("name", "metric"), [("piqa", "acc_norm"), ("boolq", "acc")])
def test_accuracy_and_error_agree_with_the_harness(model, harness, name, metric):
    ours = evaluate_tasks(model, None, name, limit=DOCUMENTS)[name]
    theirs = harness["results"][f"local_{name}"]
    # The harness counts characters without the space before the answer.
    assert ours.accuracy_without_space == pytest.approx(theirs[f"{metric},none"])
    assert 0 < ours.accuracy_without_space < 1
    if ours.accuracy == ours.accuracy_without_space:
        assert ours.standard_error == pytest.approx(theirs[f"{metric}_stderr,none"])


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.slow("another program")
def test_log_likelihoods_agree_with_the_harness(model, harness, name):
    from l2r_lab.training.evaluation.task_scoring import score_batch

    (task,) = select_tasks(name)
    dataset = build_requests(task, task_tokenizer(None, vocab_size=50280), limit=DOCUMENTS)
    ours = {}
    for start in range(0, len(dataset), 8):
        samples = dataset.samples[start : start + 8]
        for request in score_batch(model, dataset.collate_fn(samples), "acc"):
            ours[request.document, request.answer] = request.score
    assert len(ours) == 2 * DOCUMENTS
    for sample in harness["samples"][f"local_{name}"]:
        for answer, (response, _) in enumerate(sample["filtered_resps"]):
            # fp32 sums of log-probabilities near -1000 over batches of another shape.
            assert ours[sample["doc_id"], answer] == pytest.approx(float(response), rel=1e-5)
