"""OpenAI's answers: whole, or in chunks of a stream of events."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from l2r.engines.serve.sampling import Choice
from l2r.engines.serve.sequence import Step
from l2r.engines.serve.text import UNFINISHED

DONE = "data: [DONE]\n\n"


def event(body: Any) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


class Answer(ABC):
    """The form of one kind of request's answer; ``whole`` and ``chunk`` fill it."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, model: str, tokenizer: Any, *, logprobs: bool) -> None:
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer, self._logprobs = tokenizer, logprobs

    def whole(self, steps: Sequence[Sequence[Step]], prompt_tokens: int) -> dict[str, Any]:
        """The answer from every step of every choice."""
        choices = [
            {"index": index, "finish_reason": made[-1].finish, **self._whole(made)}
            for index, made in enumerate(steps)
        ]
        used = usage(prompt_tokens, sum(not step.echoed for made in steps for step in made))
        return {**self._head, "object": self.object, "choices": choices, "usage": used}

    def chunk(self, index: int, step: Step, written: int) -> dict[str, Any]:
        """One step of choice ``index``, of which ``written`` characters were sent."""
        choice = {"index": index, "finish_reason": step.finish, **self._part(step, written)}
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    def first(self, index: int) -> dict[str, Any] | None:
        """A chunk before the first step, where the form has one."""
        return None

    def last(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """The chunk of ``stream_options.include_usage``."""
        used = usage(prompt_tokens, new_tokens)
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": used}

    @abstractmethod
    def _whole(self, steps: Sequence[Step]) -> dict[str, Any]: ...

    @abstractmethod
    def _part(self, step: Step, written: int) -> dict[str, Any]: ...

    def _text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token])
        return text


class CompletionAnswer(Answer):
    """Answers of /v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        return {"text": "".join(step.text for step in steps), "logprobs": self._listed(steps, 0)}

    def _part(self, step: Step, written: int) -> dict[str, Any]:
        return {"text": step.text, "logprobs": self._listed([step], written)}

    def _listed(self, steps: Sequence[Step], written: int) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        listed: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for step in steps:
            choice = step.choice
            listed["tokens"].append(self._text(choice.token))
            listed["token_logprobs"].append(choice.logprob)
            likeliest = {self._text(token): value for token, value in choice.likeliest}
            # The first token of a prompt has no probability.
            listed["top_logprobs"].append(None if choice.logprob is None else likeliest)
            listed["text_offset"].append(written)
            written += len(step.text)
        return listed


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any]:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
        choices = [{**choice, "logprobs": None, "finish_reason": None}]
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def _whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        text = "".join(step.text for step in steps)
        message = {"role": "assistant", "content": text}
        return {"message": message, "logprobs": self._listed(steps)}

    def _part(self, step: Step, written: int) -> dict[str, Any]:
        return {"delta": {"content": step.text}, "logprobs": self._listed([step])}

    def _listed(self, steps: Sequence[Step]) -> dict[str, Any] | None:
        return {"content": [self._one(step.choice) for step in steps]} if self._logprobs else None

    def _one(self, choice: Choice) -> dict[str, Any]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._text(token)
            whole = None if UNFINISHED in text else list(text.encode())
            return {"token": text, "logprob": logprob, "bytes": whole}

        likeliest = [entry(*pair) for pair in choice.likeliest]
        return {**entry(choice.token, choice.logprob), "top_logprobs": likeliest}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """The numbers of tokens of one request."""
    total = prompt_tokens + new_tokens
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": total
    }  # fmt: skip
