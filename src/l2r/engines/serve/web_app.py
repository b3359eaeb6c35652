"""The routes: completions, chat completions, models, health."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from l2r.engines.serve.answers import DONE, Answer, ChatAnswer, CompletionAnswer, event
from l2r.engines.serve.doors import Doors
from l2r.engines.serve.errors import RequestError
from l2r.engines.serve.flow import Flow
from l2r.engines.serve.limits import ServeLimits
from l2r.engines.serve.prompts import Prompt, Prompts
from l2r.engines.serve.requests import ChatRequest, CompletionRequest, parse
from l2r.engines.serve.sequence import FAULT, Step
from l2r.engines.serve.worker import Worker
from l2r.hf.routes import Fingerprint
from l2r.runs.spelling import same_name


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


def build(served: Served, *, host: str, allowed: Collection[str]) -> Doors:
    """The application for one checkpoint, listening on ``host``."""
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
        trouble = "too many requests are in flight" if doors.full else None
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
    doors = Doors(app, host=host, allowed=allowed, limits=served.limits)  # read by health above
    return doors


async def _asked(served: Served, request: Request, kind: type[Any]) -> Any:
    """The body of a request. Raises RequestError for what this server cannot do."""
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
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body:
                    message = f"the body must have at most {limits.body} bytes"
                    raise RequestError(413, message, code="request_too_large")
    except TimeoutError:
        message = f"the body must arrive within {limits.body_seconds:g} seconds"
        raise RequestError(408, message) from None
    except ClientDisconnect:
        raise RequestError(499, "the client left") from None
    return bytes(body)


async def _collected(flow: Flow) -> list[list[Step]]:
    steps: list[list[Step]] = [[] for _ in flow.sequences]
    async for index, step in flow.steps():
        steps[index].append(step)
    return steps


async def _unless_left(
    request: Request, work: Coroutine[Any, Any, list[list[Step]]]
) -> list[list[Step]]:
    """The result of ``work``, which is cancelled when the client leaves (RequestError)."""

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
