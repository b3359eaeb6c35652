"""The first look at a request, before its body is read: host, origin, number in flight."""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from l2r.engines.serve.errors import RequestError
from l2r.engines.serve.limits import ServeLimits

_LOCAL = ("localhost", "127.0.0.1", "::1")


class Doors:
    """Refuses requests that a web page sends through a visitor's browser, and too many at once.

    A page may give its own name the address of this machine (DNS rebinding), so the Host must be
    one that is meant; where every address is listened on, any numeric one is. An Origin must be
    the host that is asked.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, allowed: Collection[str], limits: ServeLimits
    ) -> None:
        self._app, self._limits = app, limits
        self._hosts = {name.lower() for name in (*_LOCAL, host, *allowed)}
        self._any_number = host in ("0.0.0.0", "::", "")
        self._in_flight = 0

    @property
    def full(self) -> bool:
        """Whether the next request would be refused for its number."""
        return self._in_flight >= self._limits.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(Headers(scope=scope))
            if scope["method"] == "POST" and self.full:
                count = self._limits.requests
                message = f"{count} requests are in flight, the most at a time; try again"
                raise RequestError(429, message, code="too_many_requests")
        except RequestError as error:
            headers = {"Retry-After": "1"} if error.status == 429 else None
            await error.response(headers)(scope, receive, send)
            return
        counted = scope["method"] == "POST"
        self._in_flight += counted
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_flight -= counted

    def _check(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not self._is_meant(_name(f"//{host}")):
            raise RequestError(
                403, f"Host must be one of {sorted(self._hosts)}; got {host[:100]!r}"
            )
        for origin in headers.getlist("origin"):
            if origin.lower() not in (f"http://{host}", f"https://{host}"):
                raise RequestError(403, f"Origin must be that of this server; got {origin[:100]!r}")

    def _is_meant(self, name: str | None) -> bool:
        if name is None:
            return False
        return name in self._hosts or (self._any_number and _is_number(name))


def _name(url: str) -> str | None:
    """The host of a URL in small letters, None where it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # which raises for one that is no number
    except ValueError:
        return None
    return None if "@" in parts.netloc else parts.hostname


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
