"""uvicorn's connections with bounds that it lacks: their number, and the waits for clients."""

import asyncio
import json
import socket
from collections.abc import Callable
from http import HTTPStatus

from uvicorn.protocols.http.h11_impl import H11Protocol

from l2r.engines.serve.errors import RequestError
from l2r.engines.serve.limits import ServeLimits

_BUFFER = 2**14  # bytes of an answer that wait for a client, here and in its socket


def connection_class(limits: ServeLimits) -> type:
    """The protocol of a connection.

    One is closed when no request's head comes in time, and broken off when the client does not
    take what is written.
    """

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            # Linux would hold megabytes, all of an answer, for a client that takes nothing of it.
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            transport.set_write_buffer_limits(_BUFFER)
            if len(self.connections) > limits.connections:
                message = f"{limits.connections} connections are open, the most at a time"
                self._refuse(RequestError(429, message, code="too_many_connections"))
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait(limits.take_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop()
            self._watch()

        def send_400_response(self, msg: str) -> None:
            self._refuse(RequestError(400, msg))

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Wait for the end of a head, unless an answer is being made."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._timer is None:
                self._wait(limits.head_seconds, self._expire)

        def _expire(self) -> None:
            self.transport.close()  # which first waits for the client to take the last answer
            self._wait(limits.take_seconds, self.transport.abort)

        def _wait(self, seconds: float, act: Callable[[], None]) -> None:
            self._stop()
            self._timer = self.loop.call_later(seconds, act)

        def _refuse(self, error: RequestError) -> None:
            self.transport.write(_last_answer(error))
            self.transport.close()

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Connection


def _last_answer(error: RequestError) -> bytes:
    """Answer in HTTP on a connection from which no request was read."""
    body = json.dumps(error.body()).encode()
    again = "Retry-After: 1\r\n" if error.status == HTTPStatus.TOO_MANY_REQUESTS else ""
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{again}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
