"""Clients that leave, hang or come in crowds, and workers that stop."""

import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from l2r.engines.serve.options import ServeLimits
from l2r.engines.serve.sequence import Sequence
from l2r.engines.serve.worker import OneByOne
from l2r.hf.routes.recorder import RouterChoices
from tests.engines.serve.conftest import CONTEXT, serving

MODES = pytest.mark.parametrize("batching", [False, True], ids=["one_by_one", "batching"])


class Gate:
    """Stops every sequence before its second token until ``open``."""

    def __init__(self):
        self.steps, self.sequences = 0, []
        self.reached, self._opened = threading.Event(), threading.Event()
        self._step = Sequence.step

    def step(self, sequence, logits):
        self.steps += 1
        self.sequences.append(sequence)
        if self.steps > 1:
            self.reached.set()
            self._opened.wait(60)
        return self._step(sequence, logits)

    def open(self):
        self._opened.set()


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(Sequence, "step", lambda *args: gate.step(*args))  # noqa: PLW0108 (binds self)
    yield gate
    gate.open()


@contextmanager
def sent(client, **fields):
    """A request whose answer has not been read, on a socket that the block may close."""
    body = {"model": "served", "prompt": "a", "max_tokens": CONTEXT - 10, "temperature": 0}
    connection = http.client.HTTPConnection("localhost", client.port, timeout=60)
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body | fields),
            {"Content-Type": "application/json"},
        )
        yield connection
    finally:
        connection.close()


def until(condition):
    """Wait for what happens in another thread; a minute is for a machine that stands still."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise TimeoutError("it did not happen")


@MODES
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_generation(batching, stream, folder, gate):
    with serving(folder, continuous_batching=batching) as client:
        with sent(client, stream=stream):
            assert gate.reached.wait(60)
        until(lambda: gate.sequences[0].over)
        gate.open()
        assert client.complete(max_tokens=1).status == 200
    assert gate.steps <= 2 + 1  # one token, the one at the gate, and the good request's


@MODES
def test_a_request_whose_client_left_is_never_begun(batching, folder, gate, monkeypatch):
    with serving(folder, continuous_batching=batching) as client:
        submitted, submit = [], client.worker.submit
        monkeypatch.setattr(client.worker, "submit", lambda s: (submitted.append(s), submit(s)))
        with sent(client, max_tokens=2):
            assert gate.reached.wait(60)
            with sent(client, prompt="b"):
                until(lambda: len(submitted) == 2)
            until(lambda: submitted[1].over)
            gate.open()
            assert client.complete(max_tokens=1).status == 200
    assert submitted[1] not in gate.sequences


@MODES
def test_health_is_503_while_no_token_comes(batching, folder, gate):
    limits = ServeLimits(stall_timeout=0)
    with serving(folder, continuous_batching=batching, limits=limits) as client:
        assert client.ask("/health").status == 200
        with sent(client, max_tokens=2) as connection:
            assert gate.reached.wait(60)
            health = client.ask("/health")
            assert health.status == 503 and "no token for" in health.error["message"]
            gate.open()
            assert connection.getresponse().status == 200
        until(lambda: client.ask("/health").status == 200)


@MODES
def test_health_is_503_when_the_worker_is_gone(batching, folder):
    with serving(folder, continuous_batching=batching) as client:
        client.worker.close()
        assert client.ask("/health").status == 503
        answer = client.complete()
        assert answer.status == 503 and answer.error["type"] == "server_error"


def test_more_requests_than_allowed_are_told_to_wait(folder, gate):
    with (
        serving(folder, limits=ServeLimits(max_requests=1)) as client,
        sent(client, max_tokens=2) as first,
    ):
        assert gate.reached.wait(60)
        answer = client.complete()
        assert answer.status == 429 and answer.error["type"] == "rate_limit_error"
        assert client.ask("/health").status == 503  # which says that none would be answered
        assert client.ask("/v1/models").status == 200
        gate.open()
        assert first.getresponse().status == 200
        until(lambda: client.ask("/health").status == 200)
        assert client.complete(max_tokens=1).status == 200


@MODES
def test_answers_in_the_making_end_with_the_server(batching, folder, monkeypatch):
    steps, step = [], Sequence.step

    def slow(sequence, logits):
        steps.append(time.sleep(0.05))
        return step(sequence, logits)

    monkeypatch.setattr(Sequence, "step", slow)
    with ThreadPoolExecutor() as pool:
        with serving(folder, continuous_batching=batching) as client:
            answer = pool.submit(client.complete, max_tokens=CONTEXT - 20)
            until(lambda: len(steps) > 1)
        assert answer.result().status == 503
    assert len(steps) < CONTEXT - 20


def test_a_batching_loop_that_died_is_started_again(folder, monkeypatch):
    def broken():
        raise RuntimeError("planted")

    with serving(folder, continuous_batching=True) as client:
        first = client.complete()
        processor = client.worker._manager.batch_processor
        monkeypatch.setattr(processor, "prepare_next_batch", broken)
        failed = client.complete()
        assert failed.status == 503 and failed.error["type"] == "server_error"
        until(lambda: client.ask("/health").status == 200)
        assert client.complete().body["choices"] == first.body["choices"]


@pytest.mark.parametrize("place", ["forward", "end"])
def test_a_step_that_fails_while_experts_are_noted_leaves_no_hook(place, folder, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("planted")

    with serving(folder, continuous_batching=True) as client:
        first = client.complete(return_routed_experts=True)
        last = client.worker._model.model.layers[-1]
        with monkeypatch.context() as planted:
            at = {"forward": (last, "forward"), "end": (RouterChoices, "experts")}[place]
            planted.setattr(*at, broken)
            assert client.complete(return_routed_experts=True).status == 503
        until(lambda: client.ask("/health").status == 200)
        for routed in (False, True):
            found = client.complete(return_routed_experts=routed)
            assert found.body["choices"][0]["text"] == first.body["choices"][0]["text"]
        assert found.body["choices"] == first.body["choices"]


def test_prompts_longer_than_the_cache_do_not_end_batching(folder):
    """In a cache of one block of 256 tokens, all of which a request may fill."""
    with serving(folder, continuous_batching=True, num_blocks=1) as client:
        context = client.worker.context
        for prompt in ([5] * context, "word " * 200_000, ""):
            assert client.complete(prompt=prompt).status == 400
        most = min(context, CONTEXT) - 1
        with ThreadPoolExecutor() as pool:  # more than fit at once
            whole = pool.map(
                lambda n: client.complete(prompt=[n] * (most - 20), max_tokens=20), range(4)
            )
            assert [answer.status for answer in whole] == [200] * 4


@MODES
@pytest.mark.slow("a server under load")
def test_many_clients_get_the_answers_of_one(batching, folder):
    prompts = ["Question", "what is", "Answer: yes", "no", "the", "or", "is the answer", "what"]
    with serving(folder, continuous_batching=batching) as client, ThreadPoolExecutor(8) as pool:
        alone = [client.complete(prompt=p, max_tokens=8).body["choices"] for p in prompts]
        together = pool.map(lambda p: client.complete(prompt=p, max_tokens=8), prompts * 3)
        assert [answer.body["choices"] for answer in together] == alone * 3


def test_a_stream_that_nobody_takes_ends_when_others_wait(folder, gate):
    """Eight answers to a client that reads none: buffers fill, tokens pile up, the next is served.

    Their events are half a megabyte, more than the buffers hold.
    """
    gate.open()
    many = {"prompt": "a", "max_tokens": CONTEXT - 10, "n": 8, "stream": True, "logprobs": 5}
    body = json.dumps({"model": "served", **many}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with serving(folder, limits=ServeLimits(max_unread=20)) as client, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**11)
        stalled.connect(("localhost", client.port))
        stalled.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        assert gate.reached.wait(60)
        assert client.complete(max_tokens=1).status == 200
        until(lambda: not client.worker._busy())
    assert gate.steps < 8 * (CONTEXT - 10) / 2


def test_a_stream_that_is_taken_goes_on_while_others_wait(folder, gate):
    gate.open()
    with (
        serving(folder, limits=ServeLimits(max_unread=20)) as client,
        sent(client, stream=True, logprobs=5) as connection,
    ):
        assert gate.reached.wait(60)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(client.complete, max_tokens=1)
            events = connection.getresponse().read().count(b"data: ")
            assert other.result().status == 200
    assert events == CONTEXT - 10 + 1


def test_the_echo_of_a_prompt_is_not_what_a_client_did_not_take():
    """Its tokens are written at once, before the client can take one."""
    worker = Mock(spec=OneByOne, _unread=20, _waiting=Mock(empty=lambda: False))
    for echo, unread, failed in ((True, 120, False), (True, 121, True), (False, 21, True)):
        sampling = Mock(echo=echo)
        sequence = Mock(
            spec=Sequence, prompt=[1] * 100, sampling=sampling, unread=lambda n=unread: n
        )
        OneByOne._look(worker, sequence)
        assert sequence.fail.called == failed
