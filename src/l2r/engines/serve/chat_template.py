"""A checkpoint's chat template, which is a program, in a process that can be ended."""

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from l2r.engines.serve.errors import RequestError
from l2r.engines.serve.limits import ServeLimits
from l2r.engines.serve.worker import STOPPING
from l2r.errors import blames_input

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
        """The prompt's text. Raises RequestError: 400 where refused, 503 for too much time."""
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
            answer = self._renderer.ask(messages, self._limits.template_seconds)
        except TimeoutError:
            self._renderer = None
            seconds = self._limits.template_seconds
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
        """Raises TimeoutError, and EOFError where the process ended by itself; either ends it."""
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
