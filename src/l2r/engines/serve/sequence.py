"""One answer in the making: logits come in, text and the reason of its end go out."""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from l2r.engines.serve.routed import RoutedTokens
from l2r.engines.serve.sampling import Choice, Sampler, Sampling
from l2r.engines.serve.streamed_text import Text
from l2r.errors import InputError, is_out_of_memory

FAULT = "a fault of the server; its log has more"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Step:
    """One token, the text that became certain with it, and why it was the last, if it was."""

    choice: Choice
    text: str
    finish: Literal["stop", "length"] | None
    echoed: bool = False  # a token of the prompt
    begins_text: bool = False  # no text is before it: the space of a first word is cut
    routed_experts: str | None = None  # of the whole sequence, with its last token


@dataclass(frozen=True)
class Failure:
    """The reason why an answer ends without its last token, and the status that says so."""

    message: str
    status: int = 503


class Sequence:
    """A prompt and the tokens after it.

    A worker calls ``step`` in its thread until ``over``; ``listener`` is called there, once a step
    or with a ``Failure``; ``unread`` counts those that nobody took. ``cancel`` may be called from
    any thread. Where ``routed`` is not None the worker puts the experts of forwarded tokens into
    it, before the step.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        tokenizer: Any,
        ends: frozenset[int],
        listener: Callable[[Step | Failure], None],
        unread: Callable[[], int] = lambda: 0,
        routed: RoutedTokens | None = None,
    ) -> None:
        self.prompt, self.sampling, self.routed = prompt, sampling, routed
        self.name, self.unread = uuid.uuid4().hex, unread
        self.over = False
        self._ends, self._listener, self._tokenizer = ends, listener, tokenizer
        self._choose = Sampler(sampling)
        self._text = Text(tokenizer, sampling.stop, prompt=prompt)
        self._steps = 0

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.over = True

    def fail(self, message: str, status: int = 503) -> None:
        """End it without an answer."""
        if not self.over:
            self.over = True
            self._listener(Failure(message, status))

    def break_off(self, error: Exception) -> None:
        """End it for an error: one of the model or of memory is named, a bug is in the log."""
        if isinstance(error, InputError) or is_out_of_memory(error):
            self.fail(f"cannot go on: {error}")
        else:
            _log.error("an answer ended with a bug of l2r", exc_info=error)
            self.fail(FAULT, 500)

    def echo(self, logits: Tensor | None) -> None:
        """Pass the prompt on; ``logits`` [T, V] give its tokens after the first their scores."""
        text = Text(self._tokenizer)
        for place, token in enumerate(self.prompt):
            choice = Choice(token)
            if logits is not None and place > 0:
                choice = self._choose.score(logits[place - 1].float().cpu(), token)
            begins = text.empty
            piece = text.push(token)
            if place == len(self.prompt) - 1:
                piece += text.finish()
            self._listener(Step(choice, piece, None, echoed=True, begins_text=begins))

    def step(self, logits: Tensor) -> int:
        """Choose the next token from ``logits`` [V], pass it on and return it."""
        try:
            choice = self._choose(logits)
            self._steps += 1
            ends = choice.token in self._ends
            begins = self._text.empty
            text = "" if ends else self._text.push(choice.token)
            finish: Literal["stop", "length"] | None = None
            if ends or self._text.stopped:
                finish = "stop"
            elif self._steps >= self.sampling.max_tokens:
                finish = "length"
            if finish and not self._text.stopped:
                text += self._text.finish()
            experts = None
            if finish and self.routed is not None:
                experts = self.routed.text(len(self.prompt) + self._steps)
        except Exception as error:  # one answer's trouble must not end the worker's loop
            self.break_off(error)
            return 0
        if not self.over:
            self.over = finish is not None
            step = Step(choice, text, finish, routed_experts=experts, begins_text=begins)
            self._listener(step)
        return choice.token
