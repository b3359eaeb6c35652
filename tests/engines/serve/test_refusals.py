"""What the server must refuse: other routes, other hosts, bad values; good requests go on."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from l2r.engines.serve.options import ServeLimits
from l2r.engines.serve.requests import IGNORED, ChatRequest, CompletionRequest
from tests.engines.serve.bad_requests import (
    BODIES,
    CHATS,
    COMPLETIONS,
    CONTENT_TYPES,
    HOSTS,
    NO_ROUTES,
    ORIGINS,
    pairs,
)
from tests.engines.serve.conftest import CONTEXT, serving

ROOT = Path(__file__).resolve().parents[3]
# What is refused before a worker sees it needs one kind of worker.
BATCHING = pytest.mark.parametrize("client", [True], ids=["batching"], indirect=True)


def refused(answer, *statuses):
    assert answer.status in (statuses or (400, 404, 413)), answer
    return answer.error


def still_answers(client):
    assert client.complete().status == 200
    assert client.ask("/health") == (200, {"status": "ok"})


@BATCHING
@pytest.mark.parametrize(("method", "path"), NO_ROUTES)
def test_only_the_tested_routes_exist(client, method, path):
    body = b"{}" if method == "POST" else None
    refused(client.ask(path, body, method=method), 404, 405)


@BATCHING
def test_another_host_is_refused(client):
    for host in HOSTS:
        for path in ("/health", "/v1/models"):
            refused(client.ask(path, headers={"Host": host}), 403)
    for host in ("localhost", f"127.0.0.1:{client.port}", "LOCALHOST", "[::1]:1"):
        assert client.ask("/health", headers={"Host": host}).status == 200


@BATCHING
def test_another_origin_is_refused(client):
    own = f"http://localhost:{client.port}"
    for origin in (*ORIGINS, own + ".evil.example"):
        answer = client.ask("/v1/completions", {}, headers={"Origin": origin})
        refused(answer, 403)
    assert client.ask("/v1/models", headers={"Origin": own}).status == 200


@BATCHING
@pytest.mark.parametrize("field", COMPLETIONS)
def test_bad_values_of_a_completion_are_refused_by_name(client, field):
    for value in COMPLETIONS[field]:
        error = refused(client.complete(**{field: value}))
        assert error["param"] in (field, None), (value, error)
    still_answers(client)


@BATCHING
@pytest.mark.parametrize("field", CHATS)
def test_bad_values_of_a_chat_are_refused_by_name(client, field):
    for value in CHATS[field]:
        error = refused(client.chat(**{field: value}))
        assert error["param"] in (field, None), (value, error)
    still_answers(client)


@BATCHING
@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:24]))
def test_bad_bodies_are_refused(client, body):
    for path in ("/v1/completions", "/v1/chat/completions"):
        refused(client.ask(path, body), 400)


@BATCHING
def test_another_content_type_is_refused(client):
    """A form is what any web page may post without asking the server."""
    body = json.dumps({"model": "served", "prompt": "a", "max_tokens": 1}).encode()
    for kind in CONTENT_TYPES:
        refused(client.ask("/v1/completions", body, headers={"Content-Type": kind}), 415)
    spelled = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.ask("/v1/completions", body, headers=spelled).status == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def number(value, low, high, kind=int | float):
    return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high


ACCEPTED = {
    "prompt": lambda value: value != "" and isinstance(value, str | list),
    "max_tokens": lambda value: number(value, 1, CONTEXT, int),
    "temperature": lambda value: number(value, 0, 2),
    "top_p": lambda value: number(value, 0, 1),
    "n": lambda value: number(value, 1, 32, int),
    "seed": lambda value: number(value, -(2**63), 2**63 - 1, int),
    "stop": lambda value: isinstance(value, str | list) and value != "",
    "stream": lambda value: isinstance(value, bool),
    "logprobs": lambda value: number(value, 0, 5, int),
    "echo": lambda value: isinstance(value, bool),
    "best_of": lambda value: number(value, 1, 1, int),
}


@given(field=st.sampled_from([*COMPLETIONS, "unknown"]), value=json_values)
def test_no_value_is_an_error_of_the_server(client, field, value):
    answer = client.complete(**{field: value})
    if answer.status == 200:
        assert field != "prompt" if value is None else ACCEPTED[field](value)
    else:
        refused(answer)


@given(bad=st.lists(st.sampled_from(pairs(COMPLETIONS)), min_size=1, max_size=4))
def test_a_good_request_after_bad_ones_is_answered(client, bad):
    refused(client.complete(**dict(bad)))
    still_answers(client)


@pytest.fixture(scope="module", params=[False, True], ids=["one_by_one", "batching"])
def extended(request, folder, tmp_path_factory):
    """A server whose tokenizer has a token more than its model, as those that were extended."""
    copy = tmp_path_factory.mktemp("extended") / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).symlink_to(file)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im|>"]})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copy / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(copy)
    with serving(copy, continuous_batching=request.param) as client:
        yield client, len(tokenizer) - 1


def test_a_token_that_the_model_has_not_is_refused_in_text_too(extended):
    client, unknown = extended
    for prompt in (
        "<|im|>",
        "Question: <|im|> what",
        ["yes", "<|im|>"],
        [unknown],
        [[5], [unknown]],
    ):
        error = refused(client.complete(prompt=prompt), 400)
        assert error["param"] == "prompt" and str(unknown) in error["message"], prompt
    error = refused(client.chat(messages=[{"role": "user", "content": "yes <|im|>"}]), 400)
    assert error["param"] == "messages" and str(unknown) in error["message"]
    still_answers(client)


def test_an_unknown_token_of_one_request_ends_no_other(extended):
    client, _ = extended
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(client.complete, max_tokens=CONTEXT - 10)
        while not (client.worker._busy() or long.done()):
            time.sleep(0.01)
        refused(client.complete(prompt="<|im|>"), 400)
        assert long.result().status == 200


def test_the_page_has_the_limits():
    limits, page = ServeLimits(), (ROOT / "docs" / "serving.md").read_text()
    tables = [line.strip("| ").split(" | ") for line in page.splitlines() if line[:1] == "|"]
    rows = {cells[0]: cells[1] for cells in tables if len(cells) > 1}
    assert rows["choices of a request, prompts times `n`"] == f"{limits.max_choices}"
    assert rows["requests in flight"] == f"{limits.max_requests}, `--max-requests`"
    assert rows["seconds until a request's header is there"] == f"{limits.header_timeout}"
    assert rows["seconds until its body is there"] == f"{limits.body_timeout}"
    assert rows["seconds until a client takes what was written"] == f"{limits.write_timeout}"
    assert rows["seconds of a chat template"] == f"{limits.template_timeout}"
    assert rows["memory of a chat template"] == f"{limits.template_bytes // 2**30} GiB"
    assert rows["tokens of a stream not taken, while others wait"] == f"{limits.max_unread}"
    assert rows["seconds of work without a token"] == f"{limits.stall_timeout}"
    assert f"{limits.characters // limits.context} times the context" in page
    fields = CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys() | {*IGNORED}
    assert not {field for field in fields - {"prompt", "messages"} if f"`{field}`" not in page}
