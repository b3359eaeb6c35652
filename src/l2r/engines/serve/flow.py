"""The answers to one request, from the worker's threads into the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from l2r.engines.serve.errors import RequestError
from l2r.engines.serve.prompts import Prompt
from l2r.engines.serve.requests import ChatRequest, CompletionRequest
from l2r.engines.serve.sequence import Failure, Sequence, Step
from l2r.engines.serve.worker import Worker


class Flow:
    """Every choice of a request: ``n`` for each prompt, in this order."""

    def __init__(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        *,
        tokenizer: Any,
        ends: frozenset[int],
        worker: Worker,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Step | Failure]] = asyncio.Queue()
        self._worker = worker
        self.prompt_tokens = sum(len(prompt) for prompt, _ in prompts)
        self.sequences = [
            self._sequence(
                index, prompt, request.sampling(room, index % request.n), tokenizer, ends
            )
            for index, (prompt, room) in enumerate(p for p in prompts for _ in range(request.n))
        ]

    async def steps(self) -> AsyncIterator[tuple[int, Step]]:
        """Compute; every step with its choice's index. Raises RequestError (503) on a failure."""
        for sequence in self.sequences:
            self._worker.submit(sequence)
        running = len(self.sequences)
        while running:
            index, step = await self._queue.get()
            if isinstance(step, Failure):
                raise RequestError(503, step.message)
            running -= step.finish is not None
            yield index, step

    def cancel(self) -> None:
        """Stop what still runs: nobody waits for it."""
        for sequence in self.sequences:
            if not sequence.over:
                self._worker.cancel(sequence)

    def _sequence(
        self, index: int, prompt: list[int], sampling: Any, tokenizer: Any, ends: frozenset[int]
    ) -> Sequence:
        def listener(step: Step | Failure) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, step))

        return Sequence(prompt, sampling, tokenizer=tokenizer, ends=ends, listener=listener)
