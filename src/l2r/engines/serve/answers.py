"""OpenAI's answers: whole, or in chunks of a stream of events."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from l2r.analysis.diagnostics import token_pieces
from l2r.engines.serve.sequence import UNFINISHED, StreamedToken

DONE = "data: [DONE]\n\n"


def event(body: Any) -> str:
    """Write a server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


class Answer(ABC):
    """The form of one kind of request's answer; ``whole`` and ``chunk`` fill it.

    ``prompts``: token ids of each choice's prompt where the answer has token ids, else None.
    """

    prefix: str
    object: str
    chunk_object: str
    prompt_in_choice = True  # where vLLM puts the prompt's token ids

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        *,
        logprobs: bool,
        prompts: Sequence[list[int]] | None = None,
    ) -> None:
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer, self._logprobs, self._prompts = tokenizer, logprobs, prompts

    def whole(self, steps: Sequence[Sequence[StreamedToken]], prompt_tokens: int) -> dict[str, Any]:
        """Return the answer from every step of every choice."""
        choices = [
            {
                "index": index,
                "finish_reason": made[-1].finish,
                **self._whole(made),
                **self._tokens(index, made, begins=True),
            }
            for index, made in enumerate(steps)
        ]
        used = usage(prompt_tokens, sum(not step.echoed for made in steps for step in made))
        body = {**self._head, "object": self.object, "choices": choices, "usage": used}
        return body | self._prompt_tokens()

    def chunk(
        self, index: int, step: StreamedToken, written: int, *, begins: bool
    ) -> dict[str, Any]:
        """Write a token of choice ``index``, of which ``written`` characters were sent.

        ``begins``: it is the choice's first.
        """
        choice = {
            "index": index,
            "finish_reason": step.finish,
            **self._part(step, written),
            **self._tokens(index, [step], begins=begins),
        }
        return {**self._head, "object": self.chunk_object, "choices": [choice]}

    def first(self, index: int) -> dict[str, Any] | None:
        """Return a chunk before the first step, where the form has one."""
        return None

    def last(self, prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
        """Return the chunk of ``stream_options.include_usage``."""
        used = usage(prompt_tokens, new_tokens)
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": used}

    def _tokens(
        self, index: int, steps: Sequence[StreamedToken], *, begins: bool
    ) -> dict[str, Any]:
        """Fields of a choice that vLLM adds where they are asked for."""
        fields: dict[str, Any] = {}
        if self._prompts is not None:
            fields["token_ids"] = [step.choice.token for step in steps if not step.echoed]
            if begins and self.prompt_in_choice:
                fields["prompt_token_ids"] = self._prompts[index]
        if steps[-1].routed_experts is not None:
            fields["routed_experts"] = steps[-1].routed_experts
        return fields

    def _prompt_tokens(self) -> dict[str, Any]:
        """Fields besides the choices: the prompt of a request that has one."""
        if self._prompts is None or self.prompt_in_choice:
            return {}
        return {"prompt_token_ids": self._prompts[0]}

    @abstractmethod
    def _whole(self, steps: Sequence[StreamedToken]) -> dict[str, Any]: ...

    @abstractmethod
    def _part(self, step: StreamedToken, written: int) -> dict[str, Any]: ...

    def _with_text(self, step: StreamedToken) -> list[tuple[str, float | None]]:
        """Texts and log-probabilities: those of the likeliest tokens, the chosen one's last."""
        choice = step.choice
        tokens = [token for token, _ in choice.likeliest] + [choice.token]
        if step.begins_text:
            texts = [self._tokenizer.decode([token]) for token in tokens]
        else:
            texts = token_pieces(self._tokenizer, tokens)
        logprobs = [logprob for _, logprob in choice.likeliest] + [choice.logprob]
        return list(zip(texts, logprobs, strict=True))


class CompletionAnswer(Answer):
    """Answers of /v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _whole(self, steps: Sequence[StreamedToken]) -> dict[str, Any]:
        return {"text": "".join(step.text for step in steps), "logprobs": self._listed(steps, 0)}

    def _part(self, step: StreamedToken, written: int) -> dict[str, Any]:
        return {"text": step.text, "logprobs": self._listed([step], written)}

    def _listed(self, steps: Sequence[StreamedToken], written: int) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        listed: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for step in steps:
            pairs = self._with_text(step)
            text, logprob = pairs[-1]
            listed["tokens"].append(text)
            listed["token_logprobs"].append(logprob)
            likeliest: dict[str, float | None] = {}
            for other, value in pairs:
                likeliest.setdefault(other, value)  # many tokens may have one text
            # The first token of a prompt has no probability.
            listed["top_logprobs"].append(None if logprob is None else likeliest)
            listed["text_offset"].append(written + step.held)
            written += len(step.text)
        return listed


class ChatAnswer(Answer):
    """Answers of /v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_in_choice = False

    def first(self, index: int) -> dict[str, Any]:
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
        choices = [{**choice, "logprobs": None, "finish_reason": None}]
        body = {**self._head, "object": self.chunk_object, "choices": choices}
        return body | (self._prompt_tokens() if index == 0 else {})

    def _whole(self, steps: Sequence[StreamedToken]) -> dict[str, Any]:
        text = "".join(step.text for step in steps)
        message = {"role": "assistant", "content": text}
        return {"message": message, "logprobs": self._listed(steps)}

    def _part(self, step: StreamedToken, written: int) -> dict[str, Any]:
        return {"delta": {"content": step.text}, "logprobs": self._listed([step])}

    def _listed(self, steps: Sequence[StreamedToken]) -> dict[str, Any] | None:
        return {"content": [self._one(step) for step in steps]} if self._logprobs else None

    def _one(self, step: StreamedToken) -> dict[str, Any]:
        def entry(text: str, logprob: float | None) -> dict[str, Any]:
            whole = None if UNFINISHED in text else list(text.encode())
            return {"token": text, "logprob": logprob, "bytes": whole}

        *likeliest, chosen = (entry(*pair) for pair in self._with_text(step))
        return {**chosen, "top_logprobs": likeliest}


def usage(prompt_tokens: int, new_tokens: int) -> dict[str, int]:
    """Return the numbers of tokens of one request."""
    total = prompt_tokens + new_tokens
    return {
        "prompt_tokens": prompt_tokens, "completion_tokens": new_tokens, "total_tokens": total
    }  # fmt: skip
