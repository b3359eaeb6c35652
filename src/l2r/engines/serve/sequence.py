"""Answers while they are made: logits come in, text, experts and the finish reason go out.

Shape letters: T tokens of a forward, V vocabulary, L layers with a router, K experts chosen per
token.
"""

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from l2r.errors import InputError, is_out_of_memory
from l2r.hf.routes import Fingerprint, RouterChoices, all_layers, fingerprint_of, vllm_text
from l2r.routers.temporary import replaced

_GREEDY_BELOW = 1e-5  # a temperature by which float32 logits cannot be divided

_MIN_LOGPROB = -9999.0  # OpenAI's for what is less, of which JSON may have no number


@dataclass(frozen=True)
class Sampling:
    """The fields of a request that its tokens depend on.

    ``alternatives`` is the number of likely tokens reported with each chosen one, None for no
    log-probabilities at all. ``echo``: the answer begins with its prompt.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    alternatives: int | None = None
    echo: bool = False


@dataclass(frozen=True)
class Choice:
    """A token, its log-probability before temperature and top_p, and the likeliest tokens."""

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses tokens; the same seed and logits give the same tokens in any company."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> Choice:
        """Choose from ``logits`` [V]. Raises ValueError where they are not finite."""
        logits = logits.float().cpu()
        if not bool(logits.isfinite().all()):
            raise InputError("the model gave logits that are not finite")
        return self.score(logits, self._token(logits))

    def score(self, logits: Tensor, token: int) -> Choice:
        """Score a given token as the request asks; ``logits`` [V] on the CPU."""
        if self._sampling.alternatives is None:
            return Choice(token)
        logprobs = logits.log_softmax(-1).clamp(min=_MIN_LOGPROB)
        values, tokens = logprobs.topk(min(self._sampling.alternatives, len(logprobs)))
        likeliest = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return Choice(token, float(logprobs[token]), likeliest)

    def _token(self, logits: Tensor) -> int:
        if self._sampling.temperature < _GREEDY_BELOW:
            return int(logits.argmax())
        probabilities = ((logits - logits.max()) / self._sampling.temperature).softmax(-1)
        if self._sampling.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            ordered[1:][before[1:] >= self._sampling.top_p] = 0  # the first stays
            probabilities = torch.zeros_like(ordered).scatter(-1, order, ordered)
        return int(torch.multinomial(probabilities, 1, generator=self._random))


UNFINISHED = "\ufffd"  # what a decoder writes for the first bytes of a character
_TAILS = range(6, 25)  # tokens of a prompt that a text is read after


class StreamedText:
    """Text of a growing list of tokens; what was given out is never taken back.

    The end of a text that may become a character or a stop string is held back until the next
    token decides. The text goes on from ``prompt``: decoders cut the space before the first word
    of a text, and this one begins in the middle.
    """

    def __init__(
        self, tokenizer: Any, stop: tuple[str, ...] = (), *, prompt: list[int] | None = None
    ) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        # The last ones: decoders need some before the new one.
        self._tokens: list[int] = self._tail(prompt or [])
        self._read = len(self._tokens)
        self._held = ""
        self.stopped = False

    @property
    def empty(self) -> bool:
        """Say whether no token with text, of the prompt neither, is before the next one."""
        return not self._decode(self._tokens * 2)  # twice: decoders cut a space that is alone

    @property
    def held(self) -> int:
        """Characters that are held back because a stop string may begin with them."""
        return len(self._held)

    def push(self, token: int) -> str:
        """Add a token and return the text that is now certain; ``stopped`` after a stop string."""
        if not self._decode([token, token]):  # special or unknown: no context for the next one
            return ""
        self._tokens.append(token)
        before, after = self._decode(self._tokens[: self._read]), self._decode(self._tokens)
        if not after.endswith(UNFINISHED):
            self._tokens = self._tokens[self._read :]
            self._read = len(self._tokens)
            self._held += _added(before, after)
        return self._certain()

    def finish(self) -> str:
        """Return the text held back, when no token follows."""
        before, after = self._decode(self._tokens[: self._read]), self._decode(self._tokens)
        self._held += _added(before, after)
        self._tokens, self._read = [], 0
        text = self._certain() + self._held
        self._held = ""
        return text

    def _certain(self) -> str:
        places = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if places:
            text, self._held, self.stopped = self._held[: min(places)], "", True
            return text
        length = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - length
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _tail(self, prompt: list[int]) -> list[int]:
        """Return the last tokens of a prompt, from the first of a character on, that have text."""
        tail: list[int] = []
        for length in _TAILS:
            tail = prompt[-length:]
            text = self._decode(tail)
            if text and not text.startswith(UNFINISHED):
                break
        return tail

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def _added(before: str, after: str) -> str:
    """End of ``after`` that ``before`` lacks, where a character may be whole that was not."""
    if not after.startswith(before):
        before = before.rstrip(UNFINISHED)
    return after[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


def routes_of(model: Any) -> Fingerprint | str:
    """Fingerprint with which a model's routes are written, or the reason why they cannot be."""
    try:
        fingerprint = fingerprint_of(model)
    except InputError as error:
        return str(error)
    if fingerprint.hidden_layers is None:
        return "the configuration of this model has no num_hidden_layers"
    return fingerprint


class RoutedTokens:
    """Experts of a sequence's tokens, by position; the first ``start`` are left out."""

    def __init__(self, fingerprint: Fingerprint, start: int) -> None:
        self._fingerprint, self._start = fingerprint, start
        self._parts: list[tuple[int, np.ndarray]] = []

    def put(self, first: int, experts: Int[Tensor, "T L K"]) -> None:
        """Experts of the tokens from position ``first`` on; what was there is replaced."""
        self._parts.append((first, experts.cpu().numpy()))

    def text(self, tokens: int) -> str:
        """``routed_experts`` when the sequence has ``tokens``, of which the last is not forwarded.

        Raises ValueError where another was not forwarded either.
        """
        f = self._fingerprint
        kind = np.uint8 if f.num_experts <= 256 else np.uint16
        experts = np.zeros((tokens - 1, len(f.layers), f.top_k), kind)
        mask = np.zeros(tokens - 1, bool)
        for first, part in self._parts:
            experts[first : first + len(part)] = part[: tokens - 1 - first]
            mask[first : first + len(part)] = True
        if not mask[self._start :].all():
            missing = self._start + int(np.argmin(mask[self._start :]))
            raise InputError(f"the experts of token {missing} were not recorded")
        return vllm_text(all_layers(experts[self._start :], f))


@contextmanager
def noting(model: Any) -> Iterator[RouterChoices]:
    """Record the routers' choices in the next forward; call ``begin`` before each further one."""
    choices = RouterChoices(model)
    with replaced(choices.forwards()):
        choices.begin()
        yield choices


FAULT = "a fault of the server; its log has more"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamedToken:
    """Token, the text that became certain with it, and the finish reason if it is the last."""

    choice: Choice
    text: str
    finish: Literal["stop", "length"] | None
    echoed: bool = False  # a token of the prompt
    begins_text: bool = False  # no text is before it: the space of a first word is cut
    held: int = 0  # characters before it that are not given out yet
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
        listener: Callable[[StreamedToken | Failure], None],
        unread: Callable[[], int] = lambda: 0,
        routed: RoutedTokens | None = None,
    ) -> None:
        self.prompt, self.sampling, self.routed = prompt, sampling, routed
        self.name, self.unread = uuid.uuid4().hex, unread
        self.over = False
        self._ends, self._listener, self._tokenizer = ends, listener, tokenizer
        self._choose = Sampler(sampling)
        self._text = StreamedText(tokenizer, sampling.stop, prompt=prompt)
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
        text = StreamedText(self._tokenizer)
        for place, token in enumerate(self.prompt):
            choice = Choice(token)
            if logits is not None and place > 0:
                choice = self._choose.score(logits[place - 1].float().cpu(), token)
            begins = text.empty
            piece = text.push(token)
            if place == len(self.prompt) - 1:
                piece += text.finish()
            self._listener(StreamedToken(choice, piece, None, echoed=True, begins_text=begins))

    def step(self, logits: Tensor) -> int:
        """Choose the next token from ``logits`` [V], pass it on and return it."""
        try:
            choice = self._choose(logits)
            self._steps += 1
            ends = choice.token in self._ends
            begins, held = self._text.empty, self._text.held
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
            step = StreamedToken(
                choice, text, finish, routed_experts=experts, begins_text=begins, held=held
            )
            self._listener(step)
        return choice.token
