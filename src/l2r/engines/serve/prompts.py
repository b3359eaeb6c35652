"""Prompts of a request: chats rendered, text tokenized, checked against the context."""

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from l2r.engines.serve.options import ServeLimits
from l2r.engines.serve.requests import ChatRequest, CompletionRequest, RequestError
from l2r.engines.serve.worker import STOPPING
from l2r.errors import InputError, blames_input
from l2r.hf.checkpoints import token_ids

Prompt = tuple[list[int], int]  # token ids, and the most tokens that may follow


class Prompts:
    """Tokenizes for one model; ``ids`` is the number of token ids that it has."""

    def __init__(self, tokenizer: Any, *, ids: int, limits: ServeLimits) -> None:
        self.tokenizer = tokenizer
        self._ids, self._limits = ids, limits
        self.chats = ChatTemplate(tokenizer, limits)
        tokenizer("a")  # fast tokenizers set themselves up at the first call, in one thread

    def render(self, request: ChatRequest) -> str:
        """Render a chat as text. Raises RequestError: 400 naming the field, 503 if too slow."""
        if not self.chats.exists:
            message = "the tokenizer of this model has no chat template; use /v1/completions"
            raise RequestError(400, message, param="messages", code="no_chat_template")
        messages = [message.for_template() for message in request.messages]
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        return self.chats.render(messages)

    def read(self, request: CompletionRequest | ChatRequest, chat: str | None) -> list[Prompt]:
        """Read the prompts of a request; ``chat`` is a chat's text. Raises RequestError (400)."""
        if chat is not None:
            field = "messages"
            prompts = [self.tokenizer(chat, add_special_tokens=False)["input_ids"]]
        else:
            assert isinstance(request, CompletionRequest)
            field, prompts = "prompt", self._completion(request)
        if len(prompts) * request.n > self._limits.max_choices:
            raise RequestError(
                400,
                f"prompts times n must be at most {self._limits.max_choices}; got {len(prompts)} "
                f"prompts, n={request.n}",
                param="n" if request.n > 1 else field,
            )
        for prompt in prompts:
            self._check_ids(prompt, field)
        return [(prompt, self._room(prompt, request, field)) for prompt in prompts]

    def _completion(self, request: CompletionRequest) -> list[list[int]]:
        prompts = request.prompts
        self._check_length(sum(len(p) for p in prompts if isinstance(p, str)), "prompt")
        return [self._ids_of(p) if isinstance(p, str) else p for p in prompts]

    def _ids_of(self, text: str) -> list[int]:
        if not text:
            raise RequestError(400, "prompt must not be empty", param="prompt")
        try:
            ids: list[int] = token_ids(self.tokenizer, text)
        except InputError as error:
            raise RequestError(400, str(error), param="prompt") from None
        return ids

    def _check_length(self, characters: int, field: str) -> None:
        limit = self._limits.characters
        if characters > limit:
            message = f"{field} must have at most {limit} characters; got {characters}"
            raise RequestError(400, message, param=field, code="context_length_exceeded")

    def _check_ids(self, prompt: list[int], field: str) -> None:
        """Refuse ids without an embedding, in text too: a tokenizer may have more ids."""
        unknown = next((token for token in prompt if token >= self._ids), None)
        if unknown is not None:
            message = f"{field} must have token ids below {self._ids}; got {str(unknown)[:30]}"
            raise RequestError(400, message, param=field)

    def _room(self, prompt: list[int], request: CompletionRequest | ChatRequest, field: str) -> int:
        context = self._limits.context
        if not 1 <= len(prompt) < context:
            message = f"{field} must have 1 to {context - 1} tokens; got {len(prompt)}"
            raise RequestError(400, message, param=field, code="context_length_exceeded")
        start = request.routed_experts_prompt_start
        if start > len(prompt):
            message = (
                f"routed_experts_prompt_start must be at most {len(prompt)}, the tokens of the "
                f"prompt; got {str(start)[:30]}"
            )
            raise RequestError(400, message, param="routed_experts_prompt_start")
        room = context - len(prompt)
        if request.tokens is not None and request.tokens > room:
            raise RequestError(
                400,
                f"max_tokens must be at most {room}, the context of {context} without "
                f"{len(prompt)} of the prompt; got {str(request.tokens)[:30]}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return request.tokens or room


_PROGRAM = Path(__file__).with_name("render_chats.py")
_START_SECONDS = 60  # on a busy machine; half a second on a quiet one


class ChatTemplate:
    """Renders messages within ``limits``, one chat at a time.

    A template that loops or fills the memory loses its process, and the next chat starts another.
    A tokenizer whose class renders chats by code of its own does so in the calling thread.
    """

    def __init__(self, tokenizer: Any, limits: ServeLimits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        self._renderer: _Renderer | None = None
        self._closed = False
        self.trouble: str | None = None  # of the last chat, if it took too long
        if self._is_program:
            self._renderer = self._start()

    @property
    def exists(self) -> bool:
        """Say whether the tokenizer has a chat template."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render(self, messages: list[dict[str, str]]) -> str:
        """Render messages as text. Raises RequestError: 400 if refused, 503 for too much time."""
        if not self._is_program:
            try:
                text: str = self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # of the tokenizer's code, which may refuse what it is given
                if not blames_input(error):
                    raise
                raise _refused(str(error)) from None
            return text
        if self._closed:
            raise RequestError(503, STOPPING)
        if self._renderer is None:
            self._renderer = self._start()
        try:
            answer = self._renderer.ask(messages, self._limits.template_timeout)
        except TimeoutError:
            self._renderer = None
            seconds = self._limits.template_timeout
            self.trouble = f"the chat template did not end within {seconds:g} seconds"
            raise RequestError(503, self.trouble) from None
        except EOFError:
            self._renderer = None
            raise _refused("it ended its process") from None
        self.trouble = None
        if "refused" in answer:
            raise _refused(answer["refused"])
        return answer["text"]

    def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._renderer is not None:
            self._renderer.end()

    @property
    def _is_program(self) -> bool:
        usual = PreTrainedTokenizerBase.apply_chat_template
        return self.exists and type(self._tokenizer).apply_chat_template is usual

    def _start(self) -> "_Renderer":
        return _Renderer(
            {
                "template": self._tokenizer.get_chat_template(),
                "tokens": self._tokenizer.special_tokens_map,
                "characters": self._limits.characters,
                "bytes": self._limits.template_bytes,
            }
        )


class _Renderer:
    """A process of render_chats.py; ``settings`` are its first line."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._ready = False
        self._write(settings)

    def ask(self, messages: list[dict[str, str]], seconds: float) -> dict[str, str]:
        """Render messages. Raises TimeoutError, and EOFError if the process ended by itself."""
        if not self._ready:
            self._read(_START_SECONDS)
            self._ready = True
        self._write(messages)
        return self._read(seconds)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _write(self, value: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which the next reading says
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()

    def _read(self, seconds: float) -> dict[str, str]:
        assert self._process.stdout is not None
        late = threading.Event()

        def kill() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line.endswith("\n"):
            self.end()
            raise TimeoutError if late.is_set() else EOFError
        answer: dict[str, str] = json.loads(line)
        return answer


def _refused(reason: str) -> RequestError:
    message = f"the chat template refuses these messages: {reason}"
    return RequestError(400, message, param="messages")
