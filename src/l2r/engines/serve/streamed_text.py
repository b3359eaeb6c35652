"""Text from tokens as they come, up to a stop string."""

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a decoder writes for the first bytes of a character
_TAILS = range(6, 25)  # tokens of a prompt that a text is read after


class Text:
    """Text of a growing list of tokens; what was given out is never taken back.

    The end of a text that may become a character or a stop string is held back until the next
    token decides. The text goes on from ``prompt``: decoders cut the space before the first word
    of a text, and this one begins in the middle.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), *, prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        # The last ones: decoders need some before the new one.
        self._tokens: list[int] = self._tail(prompt)
        self._read = len(self._tokens)
        self._held = ""
        self.stopped = False

    @property
    def empty(self) -> bool:
        """Whether no token with text, of the prompt neither, is before the next one."""
        return not self._decode(self._tokens * 2)  # twice: decoders cut a space that is alone

    def push(self, token: int) -> str:
        """The text that is certain with this token; ``stopped`` when a stop string is complete."""
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
        """The text held back, when no token follows."""
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

    def _tail(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, from the first of a character on, that have text."""
        tail: list[int] = []
        for length in _TAILS:
            tail = list(prompt[-length:])
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
