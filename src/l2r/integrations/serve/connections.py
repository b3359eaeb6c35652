"""uvicorn's connections with two bounds that it lacks: their number, and the wait for a request."""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from l2r.integrations.serve.errors import RequestError
from l2r.integrations.serve.limits import Limits


def connection_class(limits: Limits) -> type:
    """The protocol of a connection; one is closed when no request's head comes in time."""

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                message = f"{limits.connections} connections are open, the most at a time"
                transport.write(_too_many(message))
                transport.close()
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Wait for the end of a head, unless an answer is being made."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._timer is None:
                self._timer = self.loop.call_later(limits.head_seconds, self.transport.close)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Connection


def _too_many(message: str) -> bytes:
    error: dict[str, Any] = RequestError(429, message, code="too_many_connections").body()
    body = json.dumps(error).encode()
    head = (
        "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
