"""Clients that leave, hang or come in crowds, and workers that stop."""

import asyncio
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from l2r.integrations.serve.doors import Doors
from l2r.integrations.serve.limits import Limits
from l2r.integrations.serve.sequence import Sequence
from tests.integrations.serve.conftest import CONTEXT, Answer, serving

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


def answered(client):
    """Whether a connection is let in."""
    try:
        return client.ask("/health").status == 200
    except ConnectionError:
        return False


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
    limits = Limits(stall_seconds=0)
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
    with serving(folder, limits=Limits(requests=1)) as client, sent(client, max_tokens=2) as first:
        assert gate.reached.wait(60)
        answer = client.complete()
        assert answer.status == 429 and answer.error["type"] == "rate_limit_error"
        assert client.ask("/health").status == 503  # which says that none would be answered
        assert client.ask("/v1/models").status == 200
        gate.open()
        assert first.getresponse().status == 200
        until(lambda: client.ask("/health").status == 200)
        assert client.complete(max_tokens=1).status == 200


def test_more_connections_than_allowed_are_closed(folder):
    with serving(folder, limits=Limits(connections=2)) as client:
        with ExitStack() as stack:
            _, _, third = (
                stack.enter_context(socket.create_connection(("localhost", client.port), 60))
                for _ in range(3)
            )
            assert third.recv(2**16).startswith(b"HTTP/1.1 429 ")
        until(lambda: answered(client))


def test_half_open_connections_are_closed(folder):
    with serving(folder, limits=Limits(head_seconds=0.05)) as client:
        for head in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: local"):
            with socket.create_connection(("localhost", client.port), 60) as half:
                half.sendall(head)
                assert half.recv(2**16) == b""
        assert client.complete().status == 200


def test_what_is_no_http_is_refused_in_the_form_of_errors(client):
    for junk in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /" + b"x" * 2**17):
        with socket.create_connection(("localhost", client.port), 60) as connection:
            connection.sendall(junk)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            error = Answer(answer.status, json.loads(answer.read())).error
            assert answer.status == 400 and error["type"] == "invalid_request_error"


def test_a_body_that_does_not_come_is_given_up(folder):
    with serving(folder, limits=Limits(body_seconds=0.05)) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        with socket.create_connection(("localhost", client.port), 60) as slow:
            slow.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n{")
            assert slow.recv(2**16).startswith(b"HTTP/1.1 408 ")


def test_a_body_above_the_limit_is_refused(client):
    limit = Limits(context=CONTEXT).body
    answer = client.ask("/v1/completions", b" " * (limit + 1))
    assert answer.status == 413 and answer.error["code"] == "request_too_large"
    assert client.ask("/v1/completions", b" " * limit).status == 400


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
def test_many_clients_get_the_answers_of_one(batching, folder):
    prompts = ["Question", "what is", "Answer: yes", "no", "the", "or", "is the answer", "what"]
    with serving(folder, continuous_batching=batching) as client, ThreadPoolExecutor(8) as pool:
        alone = [client.complete(prompt=p, max_tokens=8).body["choices"] for p in prompts]
        together = pool.map(lambda p: client.complete(prompt=p, max_tokens=8), prompts * 3)
        assert [answer.body["choices"] for answer in together] == alone * 3


def through(doors, send, **headers):
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(doors(scope, None, send))


def test_a_client_that_takes_nothing_is_given_up(folder):
    """An answer of 16 MiB, more than the buffers of sockets hold: the name of the model."""
    limits = Limits(connections=1, take_seconds=0.1)
    with (
        serving(folder, limits=limits, name="x" * 2**24) as client,
        socket.create_connection(("localhost", client.port), 60) as stuck,
    ):
        stuck.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert stuck.recv(1)
        until(lambda: answered(client))


def test_hosts_that_are_meant_are_let_in():
    def entered(host, *allowed, listening):
        messages = []

        async def app(scope, receive, send):
            messages.append("in")

        async def send(message):
            messages.append(message.get("status"))

        through(Doors(app, host=listening, allowed=allowed, limits=Limits()), send, host=host)
        return messages[0] == "in"

    assert entered("model.example:80", "Model.example", listening="localhost")
    assert not entered("model.example", listening="localhost")
    assert entered("10.0.0.7:8000", listening="10.0.0.7")
    assert not entered("10.0.0.8", listening="10.0.0.7")
    for everywhere in ("0.0.0.0", "::"):
        assert entered("10.0.0.7:8000", listening=everywhere)
        assert entered("[fe80::1]:8000", listening=everywhere)
        assert not entered("rebound.example:8000", listening=everywhere)
