"""Connections: their number, their hosts, and what comes through them too slowly or not at all."""

import asyncio
import http.client
import socket
from contextlib import ExitStack

import pytest

from l2r.engines.serve.options import ServeLimits
from l2r.engines.serve.web_app import HostAndLoadMiddleware
from tests.engines.serve.conftest import CONTEXT, serving
from tests.engines.serve.test_load import until


def answered(client):
    """Whether a connection is let in."""
    try:
        return client.ask("/health").status == 200
    except ConnectionError:
        return False


def test_more_connections_than_allowed_are_closed(folder):
    with serving(folder, limits=ServeLimits(max_connections=2, header_timeout=3600)) as client:
        with ExitStack() as stack:
            _, _, third = (
                stack.enter_context(socket.create_connection(("localhost", client.port), 60))
                for _ in range(3)
            )
            assert third.recv(2**16) == b""
        until(lambda: answered(client))


def test_half_open_connections_are_closed(folder):
    with serving(folder, limits=ServeLimits(header_timeout=0.05)) as client:
        for head in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: local"):
            with socket.create_connection(("localhost", client.port), 60) as half:
                half.sendall(head)
                assert half.recv(2**16) == b""
        assert client.complete().status == 200


def test_what_is_no_http_is_refused(client):
    for junk in (b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"GET /" + b"x" * 2**17):
        with socket.create_connection(("localhost", client.port), 60) as connection:
            connection.sendall(junk)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == 400
    assert client.ask("/health").status == 200


def test_a_body_that_does_not_come_is_given_up(folder):
    with serving(folder, limits=ServeLimits(body_timeout=0.05)) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        with socket.create_connection(("localhost", client.port), 60) as slow:
            slow.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n{")
            assert slow.recv(2**16).startswith(b"HTTP/1.1 408 ")


def test_a_body_above_the_limit_is_refused(client):
    limit = ServeLimits(context=CONTEXT).body
    answer = client.ask("/v1/completions", b" " * (limit + 1))
    assert answer.status == 413 and answer.error["code"] == "request_too_large"
    assert client.ask("/v1/completions", b" " * limit).status == 400


def through(middleware, send, **headers):
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(middleware(scope, None, send))


@pytest.mark.parametrize("more", [b"", b"G"])
def test_a_client_that_takes_nothing_is_given_up(folder, more):
    """An answer of 16 MiB, more than the buffers of sockets hold: the name of the model."""
    limits = ServeLimits(max_connections=1, write_timeout=0.1, header_timeout=3600)
    with (
        serving(folder, limits=limits, name="x" * 2**24) as client,
        socket.create_connection(("localhost", client.port), 60) as stuck,
    ):
        stuck.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert stuck.recv(1)
        stuck.sendall(more)
        until(lambda: answered(client))


def test_hosts_that_are_meant_are_let_in():
    def entered(host, *allowed, listening):
        messages = []

        async def app(scope, receive, send):
            messages.append("in")

        async def send(message):
            messages.append(message.get("status"))

        through(
            HostAndLoadMiddleware(app, host=listening, allowed=allowed, limits=ServeLimits()),
            send,
            host=host,
        )
        return messages[0] == "in"

    assert entered("model.example:80", "Model.example", listening="localhost")
    assert not entered("model.example", listening="localhost")
    assert entered("10.0.0.7:8000", listening="10.0.0.7")
    assert not entered("10.0.0.8", listening="10.0.0.7")
    for everywhere in ("0.0.0.0", "::"):
        assert entered("10.0.0.7:8000", listening=everywhere)
        assert entered("[fe80::1]:8000", listening=everywhere)
        assert not entered("rebound.example:8000", listening=everywhere)


def test_junk_after_the_answer_closes_its_connection_alone(client, caplog):
    """A body whose chunks are no chunks, refused for its type before it was read."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("localhost", client.port), 60) as connection:
        connection.sendall(head)
        assert connection.recv(2**12).startswith(b"HTTP/1.1 415 ")
        connection.sendall(b"no chunk\r\n")
        until(lambda: not connection.recv(2**12))
    assert client.complete(max_tokens=1).status == 200
    assert not [record for record in caplog.records if record.exc_info]
