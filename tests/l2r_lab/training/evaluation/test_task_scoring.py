"""Scores against the library's own metric on the same logits, and against a loop in float64."""

import math

import pytest
import torch
from olmo_eval import HFTokenizer, ICLMetric, build_task

from l2r_lab.training.evaluation.task_scoring import (
    Request,
    TaskResult,
    answer_logits,
    score_batch,
    summarize,
)
from l2r_lab.training.evaluation.task_tokenizers import task_tokenizer
from l2r_lab.training.evaluation.tasks import build_requests, select_tasks

READER = HFTokenizer(
    "tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json", pad_token_id=1, eos_token_id=50279
)


def own_and_library(model, name, limit):
    """Our requests, and the library's metric fed with the model's full logits."""
    (task,) = select_tasks(name)
    dataset = build_requests(task, READER, limit=limit, max_length=2048)
    metric = ICLMetric(dataset.metric_type)
    ours = []
    for start in range(0, len(dataset), 8):
        batch = dataset.collate_fn(dataset.samples[start : start + 8])
        with torch.no_grad():
            metric.update(batch, model(batch["input_ids"]).logits)
        ours += score_batch(model, batch, dataset.metric_type)
    return dataset, ours, metric


@pytest.mark.slow("another library")
@pytest.mark.parametrize("name", ["piqa", "boolq", "hellaswag", "sciq", "mmlu_social_sciences"])
def test_scores_and_accuracy_are_the_librarys_on_full_logits(model, name):
    dataset, ours, metric = own_and_library(model, name, limit=10)
    assert len(ours) == len(dataset)
    theirs = metric.loglikelihoods
    assert [(r.document, r.answer) for r in ours] == [(d, a) for d, a, _ in theirs]
    # fp32 logits of one forward pass, cut before or after the vocabulary projection.
    assert [r.score for r in ours] == pytest.approx([x for _, _, x in theirs], rel=1e-5, abs=1e-6)
    short = [x for _, _, x in metric.loglikelihoods_no_leading_space]
    assert [r.score_without_space for r in ours] == pytest.approx(short, rel=1e-5, abs=1e-6)
    library = metric.compute()[f"{dataset.metric_type}_v2"].item()
    assert summarize(name, ours).accuracy == pytest.approx(library, abs=1e-6)


def test_requests_are_build_tasks_own(model):
    (task,) = select_tasks("piqa")
    whole = build_task("piqa", READER)
    assert build_requests(task, READER).samples == whole.samples
    assert build_requests(task, READER, limit=3).samples == whole.samples[:6]


@pytest.mark.slow("another library")
def test_long_contexts_are_cut_as_build_task_cuts_them():
    (task,) = select_tasks("mmlu_humanities")
    whole = build_task("mmlu_humanities_mc_5shot", READER, model_ctx_len=2048)
    ours = build_requests(task, READER, max_length=2048)
    assert ours.samples == whole.samples
    cut = {s["doc_id"] for s in ours.samples if s["ctx_len"] < len(s["ctx"])}
    assert len(cut) == 41


def test_piqa_score_is_mean_log_probability_per_character(model):
    """Independent of the library: one answer, float64, token by token."""
    dataset, ours, _ = own_and_library(model, "piqa", limit=2)
    assert len(ours) == 4  # two documents, two answers each
    for request, sample in zip(ours, dataset.samples, strict=True):
        ids = torch.tensor([sample["ctx"] + sample["continuation"]])
        with torch.no_grad():
            logits = model(ids).logits[0].double()
        total = 0.0
        for position in range(len(sample["ctx"]), ids.shape[1]):
            row = logits[position - 1]
            total += (row[ids[0, position]] - torch.logsumexp(row, 0)).item()
        assert request.score == pytest.approx(total / sample["cont_str_len"], rel=1e-4)
        assert request.score_without_space == pytest.approx(
            total / (sample["cont_str_len"] - 1), rel=1e-4
        )


def test_model_without_logits_to_keep_scores_the_same(model):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, use_cache=False):
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    ids = torch.randint(0, 50280, (3, 20), generator=torch.Generator().manual_seed(0))
    starts, lengths = torch.tensor([4, 9, 2]), torch.tensor([3, 1, 5])
    with torch.no_grad():
        short = answer_logits(model, ids, starts, lengths)
        full = answer_logits(Plain(), ids, starts, lengths)
    assert short.shape == (3, 5, 50280)
    torch.testing.assert_close(short, full, rtol=1e-5, atol=1e-5)
    assert (short[1, 1:] == 0).all()


def request(document, answer, label, score, short=None):
    return Request(document, answer, label, score, score if short is None else short)


def test_ties_go_to_the_first_answer_and_repeats_count_once():
    constant = [request(0, a, 3, -1.0) for a in range(4)]  # SciQ's gold is always the last
    assert summarize("sciq", constant).accuracy == 0
    requests = [request(0, 0, 0, -1.0), request(0, 1, 0, -2.0), request(1, 1, 0, -1.0)]
    requests += [request(1, 0, 0, -3.0), request(1, 0, 0, -3.0)]
    result = summarize("piqa", requests)
    assert (result.accuracy, result.documents) == (0.5, 2)


def test_standard_error_is_of_a_mean_over_documents():
    scores = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    requests = [
        request(d, a, 0, -1.0 if (a == 0) == bool(hit) else -2.0)
        for d, hit in enumerate(scores)
        for a in range(2)
    ]
    values = torch.tensor(scores, dtype=torch.float64)
    result = summarize("piqa", requests)
    assert result.accuracy == values.mean().item()
    assert result.standard_error == pytest.approx(values.std(unbiased=True).item() / math.sqrt(8))


def test_space_in_the_length_can_change_the_answer():
    requests = [request(0, 0, 0, -1.0, short=-1.5), request(0, 1, 0, -1.1, short=-1.2)]
    result = summarize("piqa", requests)
    assert (result.accuracy, result.accuracy_without_space) == (1.0, 0.0)


def test_result_survives_json():
    result = summarize("piqa", [request(0, 0, 0, -1.0), request(0, 1, 0, -2.0)])
    assert math.isnan(result.standard_error)
    assert result.to_dict()["standard_error"] is None
    assert math.isnan(TaskResult.from_dict(result.to_dict()).standard_error)


@pytest.mark.parametrize(
    ("requests", "message"),
    [([], "has no scored requests"), ([request(0, 0, 0, math.nan)], "that are not numbers")],
)
def test_impossible_scores_are_refused(requests, message):
    with pytest.raises(ValueError, match=message):
        summarize("piqa", requests)


def test_any_hugging_face_tokenizer_is_read(small_tokenizer, olmoe_tokenizer):
    ours = task_tokenizer(olmoe_tokenizer, vocab_size=50304)
    text = "Question: Who proposed évolution?\nAnswer:"
    assert ours.encode(text, add_special_tokens=False) == READER.encode(
        text, add_special_tokens=False
    )
    assert ours.encode(text)[-1] == 50279
    assert (ours.pad_token_id, ours.eos_token_id, ours.bos_token_id) == (1, 50279, None)
    small = task_tokenizer(small_tokenizer, vocab_size=300)
    assert small.decode(small.encode(text, add_special_tokens=False)) == text


def test_bos_is_used_only_where_the_tokenizer_adds_it(small_tokenizer):
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(small_tokenizer.backend_tokenizer.to_str())
    named = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|endoftext|>")
    assert task_tokenizer(named, vocab_size=300).bos_token_id is None
    named.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert task_tokenizer(named, vocab_size=300).bos_token_id == 0


def test_padding_and_end_of_text_have_their_own_ids_or_fall_back(small_tokenizer):
    from transformers import PreTrainedTokenizerFast

    backend = small_tokenizer.backend_tokenizer
    both = task_tokenizer(small_tokenizer, vocab_size=300)
    assert (both.eos_token_id, both.pad_token_id) == (0, 1)
    names = {"eos_token": "<|padding|>"}  # the id 1, not that of the last resort
    ends = task_tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, **names), vocab_size=300
    )
    assert (ends.eos_token_id, ends.pad_token_id) == (1, 1)
    assert ends.encode_batch(["a"], add_special_tokens=True)[0][-1] == 1
    bare = task_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), vocab_size=300)
    assert (bare.eos_token_id, bare.pad_token_id) == (0, 0)


def test_missing_and_oversized_tokenizers_are_refused(small_tokenizer):
    assert task_tokenizer(None, vocab_size=50304).eos_token_id == 50279
    with pytest.raises(ValueError, match="its vocabulary of 4096 is not OLMoE's"):
        task_tokenizer(None, vocab_size=4096)
    with pytest.raises(ValueError, match="at most the model's 100 entries; got"):
        task_tokenizer(small_tokenizer, vocab_size=100)
