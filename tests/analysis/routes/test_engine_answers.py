"""Answers of a server, written as vLLM writes them."""

import base64
import json
import struct

import pytest
import torch

from l2r import record
from l2r.analysis.routes import compare_routes
from l2r.analysis.routes.engine_answers import read_answers
from l2r.hf.routes import to_sglang, to_vllm
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


def test_json_of_one_line_may_hold_other_ends_of_lines(tmp_path):
    model, tokens = ours(), batches(1)[0]["input_ids"]
    objects, _ = answers(model, tokens)
    for ended in objects:
        ended["choices"][0]["text"] = "one line\u2028another\u0085third\x0cfourth\u2029"
    path = tmp_path / "answers.jsonl"
    path.write_text("\r\n".join(json.dumps(o, ensure_ascii=False) for o in objects), "utf-8")
    assert torch.equal(torch.stack(read_answers(path, fingerprint_of(model)).rows), tokens)


def test_log_probabilities_of_a_chat_are_read_and_what_is_not_is_named(tmp_path):
    model, tokens = ours(), batches(1)[0]["input_ids"]
    objects, _ = answers(model, tokens)
    for ended in objects:
        content = [{"token": "x", "logprob": -0.25, "top_logprobs": []} for _ in tokens[0, 4:]]
        ended["choices"][0]["logprobs"] = {"content": content}
    objects[1]["choices"][0]["prompt_logprobs"] = [None, {"5": {"logprob": -1.0}}]
    objects[2]["prompt_routed_experts"] = "AAAA"
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, objects)))
    got = read_answers(path, fingerprint_of(model))
    assert (torch.stack(got.log_probs)[:, 3:9] == -0.25).all()
    assert got.unread == ("prompt_logprobs", "prompt_routed_experts")


def sglang(model, tokens):
    """What /generate answers with logprob_start_len=0, by the form of SGLang's documentation."""
    _, routes = answers(model, tokens)
    texts = to_sglang(routes.extended(1))
    return [
        {
            "text": "",
            "output_ids": row[4:],
            "meta_info": {
                "prompt_tokens": 4,
                "completion_tokens": len(row) - 4,
                "routed_experts": text,
                "input_token_logprobs": [
                    [None, row[0], None],
                    *([-2.0, i, None] for i in row[1:4]),
                ],
                "output_token_logprobs": [[-0.5, i, None] for i in row[4:]],
            },
        }
        for row, text in zip(tokens.tolist(), texts, strict=True)
    ]


def test_answers_of_sglang_are_read_as_those_of_vllm(tmp_path):
    model, tokens = ours(), batches(1)[0]["input_ids"]
    paths = [tmp_path / name for name in ("vllm.json", "sglang.json")]
    paths[0].write_text(json.dumps(answers(model, tokens)[0]))
    paths[1].write_text(json.dumps(sglang(model, tokens)))
    one, other = (read_answers(path, fingerprint_of(model)) for path in paths)
    assert torch.equal(torch.stack(one.rows), torch.stack(other.rows))
    assert one.routes == other.routes and other.unread == ()
    numbers = [torch.stack(side.log_probs).nan_to_num(nan=1.0) for side in (one, other)]
    assert torch.equal(*numbers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta["input_token_logprobs"].pop(), "logprob_start_len=0"),
        (lambda meta: meta.pop("routed_experts"), "--enable-return-routed-experts"),
        (lambda meta: meta.update(completion_tokens=5), "and 9 routes .* where 8 are due"),
        (lambda meta: meta["output_token_logprobs"].pop(), "generated token, 6; got 5"),
    ],
)
def test_what_an_answer_of_sglang_lacks_is_named(tmp_path, change, message):
    model = ours()
    objects = sglang(model, batches(1)[0]["input_ids"])
    change(objects[1]["meta_info"])
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, objects)))
    with pytest.raises(ValueError, match=message) as caught:
        read_answers(path, fingerprint_of(model))
    assert "answers.jsonl, answer 1" in str(caught.value)


def test_routes_of_fewer_tokens_are_refused_with_their_place(tmp_path):
    model = ours()
    objects, routes = answers(model, batches(1)[0]["input_ids"])
    objects[1]["choices"][0]["routed_experts"] = to_vllm(routes.truncated(7))[0]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, objects)))
    with pytest.raises(ValueError, match=r"answer 1: routes .* 9 are due; got 6 from token 0"):
        read_answers(path, fingerprint_of(model))


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


_BRACKETS = b"\x93NUMPY\x01\0" + struct.pack("<H", 9000) + b"(" * 9000
_HUGE = b"\x93NUMPY\x01\0" + struct.pack("<H", 78) + (
    b"{'descr': '<i8', 'fortran_order': False, 'shape': (2, 1000000000, 500000), }".ljust(77)
    + b"\n"
)  # fmt: skip


def b64(content):
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    "changes",
    [
        *({"logprobs": value} for value in ([1], 5, "x", {"token_logprobs": 5})),
        {"logprobs": {"content": 5}},
        *(
            {"logprobs": {"token_logprobs": [v, 1, 1, 1, 1, 1]}}
            for v in (1e300, True, "1", 10**400)
        ),
        {"routed_experts": b64(b"PK\x03\x04")},
        {"routed_experts": b64(_BRACKETS)},
        {"routed_experts": b64(_HUGE)},
        {"routed_experts": b64(_HUGE.replace(b"<i8", b"|O8"))},
        {"token_ids": [10**30]},
        {"token_ids": [-1]},
    ],
)
def test_an_odd_choice_is_refused_with_its_place(tmp_path, changes):
    model = ours()
    objects, _ = answers(model, batches(1)[0]["input_ids"])
    objects[1]["choices"][0] |= changes
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, objects)))
    with pytest.raises(ValueError, match=r"answers.jsonl, answer 1: "):
        read_answers(path, fingerprint_of(model))


@pytest.mark.parametrize(
    "answer", [{"choices": 5}, {"meta_info": 5}, {"meta_info": {}, "choices": 5}]
)
def test_an_odd_answer_is_refused_with_its_place(tmp_path, answer):
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(answer))
    with pytest.raises(ValueError, match=r"answers.jsonl, answer 0: "):
        read_answers(path, fingerprint_of(ours()))


@pytest.mark.parametrize("name", ["input_token_logprobs", "output_token_logprobs", "prompt_tokens"])
def test_odd_fields_of_sglang_are_refused(tmp_path, name):
    model = ours()
    objects = sglang(model, batches(1)[0]["input_ids"])
    objects[0]["meta_info"][name] = "x"
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(objects))
    with pytest.raises(ValueError, match=r"answers.jsonl, answer 0: "):
        read_answers(path, fingerprint_of(model))


def test_lists_in_lists_are_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="levels deep"):
        read_answers(path, fingerprint_of(ours()))
