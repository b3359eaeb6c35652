"""A header that comes twice is judged by both values."""

import asyncio

import pytest

from l2r.engines.serve.options import ServeLimits
from l2r.engines.serve.web_app import HostAndLoadMiddleware

OWN, EVIL = (b"origin", b"http://localhost:80"), (b"origin", b"http://evil.example")
HOST, OTHER = (b"host", b"localhost:80"), (b"host", b"evil.example")


def status(headers):
    """Status of the answer to a GET with these headers."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    middleware = HostAndLoadMiddleware(app, host="127.0.0.1", allowed=[], limits=ServeLimits())
    asyncio.run(middleware({"type": "http", "method": "GET", "headers": headers}, None, send))
    return sent[0]["status"]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([HOST], 200),
        ([HOST, OWN], 200),
        ([HOST, OWN, OWN], 200),
        ([HOST, OWN, EVIL], 403),
        ([HOST, EVIL, OWN], 403),
        ([HOST, OTHER], 403),
        ([OTHER, HOST], 403),
        ([], 403),
    ],
)
def test_every_value_must_be_allowed(headers, expected):
    assert status(headers) == expected
