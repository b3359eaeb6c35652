"""Worker that computes answers one after the other, in a thread, by transformers' ``generate``."""

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from l2r.engines.serve.sequence import Sequence, noting
from l2r.hf.routes import RouterChoices
from l2r.routers.offload import device_of

log = logging.getLogger(__name__)
STOPPING, NOT_RUNNING = "the server is stopping", "the worker is not running"


class Worker(ABC):
    """Computes sequences in separate threads until closed; each has at most ``context`` tokens."""

    context = 2**31
    echoes = False  # whether it gives prompts back

    def __init__(self, stall_timeout: float) -> None:
        self._stall_seconds = stall_timeout
        self._progress = time.monotonic()

    @abstractmethod
    def submit(self, sequence: Sequence) -> None:
        """Put a sequence behind those that wait."""

    @abstractmethod
    def cancel(self, sequence: Sequence) -> None:
        """Stop a sequence at its next token, or before its first."""

    @abstractmethod
    def close(self) -> None:
        """End every sequence and the threads."""

    @abstractmethod
    def _alive(self) -> bool: ...

    @abstractmethod
    def _busy(self) -> bool: ...

    def trouble(self) -> str | None:
        """Return why a sequence submitted now would not be answered, None if it would."""
        if not self._alive():
            return NOT_RUNNING
        silent = time.monotonic() - self._progress
        if self._busy() and silent > self._stall_seconds:
            return f"no token for {silent:.0f} seconds"
        return None

    def _moved(self) -> None:
        self._progress = time.monotonic()


class OneByOne(Worker):
    """Worker for one sequence at a time; others wait for their turn.

    While they do, one of which more than ``unread`` steps were not taken ends.
    """

    echoes = True

    def __init__(self, model: Any, *, stall_timeout: float = 120, unread: int = 64) -> None:
        super().__init__(stall_timeout)
        self._model, self._unread = model, unread
        self._waiting: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        self._current: Sequence | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        if self._closed:
            sequence.fail(STOPPING)
        else:
            self._waiting.put(sequence)

    def cancel(self, sequence: Sequence) -> None:
        sequence.cancel()

    def close(self) -> None:
        self._closed = True
        if (current := self._current) is not None:
            current.fail(STOPPING)
        self._waiting.put(None)
        self._thread.join(timeout=2)  # a daemon: a long prompt does not keep the process

    def _alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def _busy(self) -> bool:
        return self._current is not None

    def _run(self) -> None:
        while (sequence := self._waiting.get()) is not None:
            if self._closed:
                sequence.fail(STOPPING)
            if sequence.over:
                continue
            self._moved()
            self._current = sequence
            try:
                self._generate(sequence)
                sequence.fail("cannot generate: it ended without a last token")
            except Exception as error:  # out of memory, say: the next one may fit
                sequence.break_off(error)
            self._current = None

    def _look(self, sequence: Sequence) -> None:
        """Note that a token came, and end an answer whose client keeps others waiting."""
        self._moved()
        echoed = len(sequence.prompt) if sequence.sampling.echo else 0  # written at once
        if sequence.unread() > self._unread + echoed and not self._waiting.empty():
            sequence.fail(f"{sequence.unread()} tokens were not taken while others waited")

    @torch.inference_mode()
    def _generate(self, sequence: Sequence) -> None:
        prompt = torch.tensor([sequence.prompt], device=device_of(self._model))
        if sequence.sampling.echo:
            scored = sequence.sampling.alternatives is not None
            sequence.echo(self._model(prompt, use_cache=False).logits[0] if scored else None)
        with noting(self._model) if sequence.routed else nullcontext() as choices:
            self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=GenerationConfig(
                    max_new_tokens=sequence.sampling.max_tokens,
                    do_sample=False,
                    num_beams=1,
                    num_return_sequences=1,
                    pad_token_id=0,
                ),
                logits_processor=[_Steps(sequence, lambda: self._look(sequence), choices)],
                stopping_criteria=[_Over(sequence)],
            )


class _Steps(LogitsProcessor):
    """Leaves the token that the sequence has chosen as the only possible one."""

    def __init__(self, sequence: Sequence, moved: Any, choices: RouterChoices | None) -> None:
        self._sequence, self._moved, self._choices = sequence, moved, choices

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._moved()
        if self._choices is not None and self._sequence.routed is not None:
            experts = self._choices.experts()
            self._sequence.routed.put(input_ids.shape[1] - len(experts), experts)
            self._choices.begin()
        return only(scores, [self._sequence.step(scores[0])])


class _Over(StoppingCriteria):
    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self._sequence.over, device=input_ids.device)


def only(scores: Tensor, tokens: list[int]) -> Tensor:
    """Scores [B, V] whose largest is at ``tokens`` [B]."""
    chosen = torch.tensor(tokens, device=scores.device)[:, None]
    return torch.full_like(scores, float("-inf")).scatter(-1, chosen, 0.0)
