"""The app: first look at a request, then completions, chat completions, models or health."""

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from l2r.engines.serve.answers import DONE, Answer, ChatAnswer, CompletionAnswer, event
from l2r.engines.serve.options import ServeLimits
from l2r.engines.serve.prompts import Prompt, Prompts
from l2r.engines.serve.requests import ChatRequest, CompletionRequest, RequestError, parse
from l2r.engines.serve.sequence import (
    FAULT,
    Failure,
    RoutedTokens,
    Sampling,
    Sequence,
    StreamedToken,
)
from l2r.engines.serve.worker import Worker
from l2r.files.wording import same_name
from l2r.hf.routes import Fingerprint

_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Served:
    """All that answers are made with; ``created`` in seconds since 1970."""

    name: str
    created: int
    prompts: Prompts
    ends: frozenset[int]
    worker: Worker
    limits: ServeLimits
    routes: Fingerprint | str = "no model is served"  # or why tokens' experts cannot be returned


class HostAndLoadMiddleware:
    """Refuse requests that a web page sends through a visitor's browser, and too many at once.

    A page may give its own name the address of this machine (DNS rebinding), so the Host must be
    an allowed name; where every address is listened on, any numeric one is allowed, for which
    starlette's TrustedHostMiddleware has no pattern. An Origin must be the host that is asked.
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
        """Say whether the next request would be refused for its number."""
        return self._in_flight >= self._limits.max_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(Headers(scope=scope))
            if scope["method"] == "POST" and self.full:
                count = self._limits.max_requests
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
    """Return the host of a URL in small letters, None where it is none."""
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


def build(served: Served, *, host: str, allowed: Collection[str]) -> HostAndLoadMiddleware:
    """Return the application for one checkpoint, listening on ``host``."""
    # One thread: prompts of many requests at once would multiply the memory that they take.
    tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
    rendering = ThreadPoolExecutor(1, thread_name_prefix="chats")  # a slow one delays chats alone

    async def completions(request: Request) -> Response:
        asked = await _asked(served, request, CompletionRequest)
        prompts = await in_thread(tokenizing, served.prompts.read, asked, None)
        return await _answer(served, request, asked, prompts, CompletionAnswer)

    async def chat(request: Request) -> Response:
        asked = await _asked(served, request, ChatRequest)
        text = await in_thread(rendering, served.prompts.render, asked)
        prompts = await in_thread(tokenizing, served.prompts.read, asked, text)
        return await _answer(served, request, asked, prompts, ChatAnswer)

    def in_thread(threads: ThreadPoolExecutor, work: Callable[..., Any], *given: Any) -> Any:
        return asyncio.get_running_loop().run_in_executor(threads, work, *given)

    async def models(request: Request) -> Response:
        model = {"id": served.name, "object": "model", "owned_by": "l2r", "created": served.created}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(request: Request) -> Response:
        trouble = "too many requests are in flight" if middleware.full else None
        trouble = trouble or served.worker.trouble() or served.prompts.chats.trouble
        if trouble:
            return RequestError(503, trouble).response()
        return JSONResponse({"status": "ok"})

    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ],
        exception_handlers={RequestError: _refused, HTTPException: _no_route, Exception: _fault},
    )
    app.router.redirect_slashes = False
    # health above reads it
    middleware = HostAndLoadMiddleware(app, host=host, allowed=allowed, limits=served.limits)
    return middleware


class Flow:
    """Every choice of a request: ``n`` for each prompt, in this order.

    ``routes`` is the fingerprint of the model's, for a request that asks for them.
    """

    def __init__(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        *,
        tokenizer: Any,
        ends: frozenset[int],
        worker: Worker,
        routes: Fingerprint | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, StreamedToken | Failure]] = asyncio.Queue()
        self._worker, self._tokenizer, self._ends = worker, tokenizer, ends
        self._routes = routes if request.return_routed_experts else None
        self._start = request.routed_experts_prompt_start
        self.prompt_tokens = sum(len(prompt) for prompt, _ in prompts)
        self.sequences = [
            self._sequence(index, prompt, request.sampling(room, index % request.n))
            for index, (prompt, room) in enumerate(p for p in prompts for _ in range(request.n))
        ]

    async def steps(self) -> AsyncIterator[tuple[int, StreamedToken]]:
        """Compute; every step with its choice's index. Raises RequestError on a failure."""
        for sequence in self.sequences:
            self._worker.submit(sequence)
        running = len(self.sequences)
        while running:
            index, step = await self._queue.get()
            if isinstance(step, Failure):
                raise RequestError(step.status, step.message)
            running -= step.finish is not None
            yield index, step

    def cancel(self) -> None:
        """Stop what still runs: nobody waits for it."""
        for sequence in self.sequences:
            if not sequence.over:
                self._worker.cancel(sequence)

    def _sequence(self, index: int, prompt: list[int], sampling: Sampling) -> Sequence:
        def listener(step: StreamedToken | Failure) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, step))

        routed = None
        if self._routes is not None:
            routed = RoutedTokens(self._routes, self._start)
        return Sequence(
            prompt,
            sampling,
            tokenizer=self._tokenizer,
            ends=self._ends,
            listener=listener,
            unread=self._queue.qsize,
            routed=routed,
        )


async def _asked(served: Served, request: Request, kind: type[Any]) -> Any:
    """Return the body of a request. Raises RequestError for what this server cannot do."""
    asked = parse(kind, await _body(request, served.limits))
    if asked.model is not None and not same_name(asked.model, served.name):
        message = f"model must be {served.name!r}; got {asked.model[:100]!r}"
        raise RequestError(404, message, param="model", code="model_not_found")
    if asked.echoes and not served.worker.echoes:
        message = "echo must be false with --continuous-batching; got true"
        raise RequestError(400, message, param="echo")
    if asked.return_routed_experts and isinstance(served.routes, str):
        message = f"return_routed_experts must be false with this model: {served.routes}"
        raise RequestError(400, message, param="return_routed_experts")
    return asked


async def _answer(
    served: Served, request: Request, asked: Any, prompts: list[Prompt], form: type[Answer]
) -> Response:
    tokenizer = served.prompts.tokenizer
    routes = None if isinstance(served.routes, str) else served.routes
    flow = Flow(
        asked, prompts, tokenizer=tokenizer, ends=served.ends, worker=served.worker, routes=routes
    )
    answer = form(
        served.name,
        tokenizer,
        logprobs=asked.alternatives is not None,
        prompts=[s.prompt for s in flow.sequences] if asked.return_token_ids else None,
    )
    if asked.stream:
        events = _events(flow, answer, with_usage=asked.with_usage)
        return _Stream(events, flow.cancel)
    try:
        steps = await _unless_left(request, _collected(flow))
    finally:
        flow.cancel()
    return JSONResponse(answer.whole(steps, flow.prompt_tokens))


async def _body(request: Request, limits: ServeLimits) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(415, f"Content-Type must be application/json; got {kind[:100]!r}")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for part in request.stream():
                body += part
                if len(body) > limits.body:
                    message = f"the body must have at most {limits.body} bytes"
                    raise RequestError(413, message, code="request_too_large")
    except TimeoutError:
        message = f"the body must arrive within {limits.body_timeout:g} seconds"
        raise RequestError(408, message) from None
    except ClientDisconnect:
        raise RequestError(499, "the client left") from None
    return bytes(body)


async def _collected(flow: Flow) -> list[list[StreamedToken]]:
    steps: list[list[StreamedToken]] = [[] for _ in flow.sequences]
    async for index, step in flow.steps():
        steps[index].append(step)
    return steps


async def _unless_left(
    request: Request, work: Coroutine[Any, Any, list[list[StreamedToken]]]
) -> list[list[StreamedToken]]:
    """Return the result of ``work``, which is cancelled when the client leaves (RequestError)."""

    async def leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.create_task(work), asyncio.create_task(leaves())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RequestError(499, "the client left")  # which nobody reads
        return task.result()
    finally:
        task.cancel()
        left.cancel()


async def _events(flow: Flow, answer: Answer, *, with_usage: bool) -> AsyncIterator[str]:
    written = [0] * len(flow.sequences)
    begun = [False] * len(flow.sequences)
    new_tokens = 0
    for index in range(len(flow.sequences)):
        if (first := answer.first(index)) is not None:
            yield event(first)
    try:
        async for index, step in flow.steps():
            yield event(answer.chunk(index, step, written[index], begins=not begun[index]))
            begun[index] = True
            written[index] += len(step.text)
            new_tokens += not step.echoed
    except RequestError as error:  # too late for a status
        yield event(error.body())
        return
    if with_usage:
        yield event(answer.last(flow.prompt_tokens, new_tokens))
    yield DONE


class _Stream(StreamingResponse):
    """Server-sent events; ``on_end`` is called when they end, or the client left."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error.response()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"no {request.method} {request.url.path[:100]} here: {error.detail}"
    return RequestError(error.status_code, message).response(error.headers)


async def _fault(request: Request, error: Exception) -> Response:
    return RequestError(500, FAULT).response()
