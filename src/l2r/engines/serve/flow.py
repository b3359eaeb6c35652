"""The answers to one request, from the worker's threads into the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from l2r.engines.serve.errors import RequestError
from l2r.engines.serve.prompts import Prompt
from l2r.engines.serve.requests import ChatRequest, CompletionRequest
from l2r.engines.serve.routed import RoutedTokens
from l2r.engines.serve.sampling import Sampling
from l2r.engines.serve.sequence import Failure, Sequence, Step
from l2r.engines.serve.worker import Worker
from l2r.hf.routes import Fingerprint


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
        self._queue: asyncio.Queue[tuple[int, Step | Failure]] = asyncio.Queue()
        self._worker, self._tokenizer, self._ends = worker, tokenizer, ends
        self._routes = routes if request.return_routed_experts else None
        self._start = request.routed_experts_prompt_start
        self.prompt_tokens = sum(len(prompt) for prompt, _ in prompts)
        self.sequences = [
            self._sequence(index, prompt, request.sampling(room, index % request.n))
            for index, (prompt, room) in enumerate(p for p in prompts for _ in range(request.n))
        ]

    async def steps(self) -> AsyncIterator[tuple[int, Step]]:
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
        def listener(step: Step | Failure) -> None:
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
