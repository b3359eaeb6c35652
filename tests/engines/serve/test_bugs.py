"""A bug of ours in the middle of a request: 500, a traceback in the log, and the server goes on."""

import logging

import pytest

from tests.cli.test_bugs import ERRORS, function_of
from tests.engines.serve.test_load import until

PLACES = {
    "prompt": "l2r.engines.serve.prompts:Prompts._completion",
    "token": "l2r.engines.serve.sequence:Sampler.__call__",
}


@pytest.mark.parametrize("error", sorted(ERRORS))
@pytest.mark.parametrize("place", ["prompt", "token"])
def test_a_bug_is_500_and_logged_and_the_worker_lives(client, monkeypatch, caplog, place, error):
    first = client.complete()
    assert first.status == 200
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(function_of(PLACES[place]), "__code__", ERRORS[error].__code__)
        failed = client.complete()
    assert failed.status == 500 and failed.error["type"] == "server_error"
    assert failed.error["message"] == "a fault of the server; its log has more"

    def is_logged():  # after the answer was sent
        logged = [r for r in caplog.records if r.levelno >= logging.ERROR and r.exc_info]
        return any("injected" in str(record.exc_info[1]) for record in logged)

    until(is_logged)
    assert client.ask("/health").status == 200
    assert client.complete().body["choices"] == first.body["choices"]


def test_a_stream_that_meets_a_bug_ends_with_the_error(client, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(function_of(PLACES["token"]), "__code__", ERRORS["key_error"].__code__)
        body = client.complete(stream=True).body
    assert b'"a fault of the server; its log has more"' in body and b"[DONE]" not in body
    assert client.complete().status == 200


def no_memory(*args, **options):
    raise MemoryError("injected")


def not_finite(*args, **options):
    from l2r.errors import InputError

    raise InputError("the model gave logits that are not finite")


@pytest.mark.parametrize(("error", "words"), [(no_memory, "injected"), (not_finite, "not finite")])
def test_memory_and_the_model_are_named_and_no_bugs(client, monkeypatch, error, words):
    with monkeypatch.context() as patch:
        patch.setattr(function_of(PLACES["token"]), "__code__", error.__code__)
        failed = client.complete()
    assert failed.status == 503 and words in failed.error["message"]
    assert client.complete().status == 200
