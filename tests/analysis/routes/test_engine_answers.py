"""Answers of a server, written as vLLM writes them."""

import json

import pytest
import torch

from l2r import record
from l2r.analysis.routes import compare_routes
from l2r.analysis.routes.engine_answers import read_answers
from l2r.hf.routes import to_vllm
from l2r.hf.routes.layers import fingerprint_of
from tests.analysis.diagnostics.models import batches, ours


def answers(model, tokens):
    """One completion of 4 prompt tokens and the rest generated, for each row."""
    with torch.no_grad(), record(model) as recorder:
        model(tokens[:, :-1])
    texts = to_vllm(recorder.routes().extended(1))
    return [
        {
            "choices": [
                {
                    "prompt_token_ids": row[:4],
                    "token_ids": row[4:],
                    "routed_experts": text,
                    "logprobs": {"token_logprobs": [-0.5] * len(row[4:])},
                }
            ]
        }
        for row, text in zip(tokens.tolist(), texts, strict=True)
    ], recorder.routes()


def test_rows_routes_and_log_probabilities_are_read(tmp_path):
    model, tokens = ours(), batches(1)[0]["input_ids"]
    objects, routes = answers(model, tokens)
    lines, whole = tmp_path / "answers.jsonl", tmp_path / "answers.json"
    lines.write_text("\n".join(map(json.dumps, objects)) + "\n")
    whole.write_text(json.dumps(objects))
    for path in (lines, whole):
        got = read_answers(path, fingerprint_of(model))
        assert torch.equal(torch.stack(got.rows), tokens)
        assert (got.routes.experts == routes.experts).all()
        assert got.routes.lengths.tolist() == [10] * 4
        given = torch.stack(got.log_probs)
        assert (given[:, 3:9] == -0.5).all() and given[:, :3].isnan().all()
        assert given[:, 9:].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda choice: choice.pop("token_ids"), "return_token_ids"),
        (lambda choice: choice.pop("routed_experts"), "--enable-return-routed-experts"),
        (lambda choice: choice["logprobs"]["token_logprobs"].pop(), "token, 6; got 5"),
    ],
)
def test_what_is_missing_is_named_with_its_place(tmp_path, change, message):
    model = ours()
    objects, _ = answers(model, batches(1)[0]["input_ids"])
    change(objects[1]["choices"][0])
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, objects)))
    with pytest.raises(ValueError, match=message) as caught:
        read_answers(path, fingerprint_of(model))
    assert "answers.jsonl, answer 1" in str(caught.value)


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_answers_of_another_vocabulary_are_refused(wrong):
    model, ids = ours(), batches(1)[0]["input_ids"]
    routes = answers(model, ids)[1].extended(1)
    rows = [*ids[:-1], torch.full_like(ids[-1], wrong)]
    with pytest.raises(ValueError, match=rf"sequence {len(rows) - 1} has {wrong} to {wrong}"):
        compare_routes(model, routes, rows)


@pytest.mark.parametrize("text", ["", "[1, 2]", "no json", '"a"'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "answers.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="must hold"):
        read_answers(path, fingerprint_of(ours()))
