"""Tokenizers of files that may be a stranger's: checked when they are opened, errors in one line.

The library behind them is written in Rust. It raises bare ``Exception``, or panics: that is no
``Exception``, and a report of it goes to standard error before anybody can catch it.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from l2r.errors import InputError, blames_input

T = TypeVar("T")

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_MOST_STEPS = 1_000  # of a part; the longest in use have a dozen
_MOST_PADDING = 10**6  # tokens to which each text is filled up
_MOST_GROWTH = 1_000  # characters that one character of text may become
# Read once when a tokenizer is opened: scripts, signs, spaces and a word in no vocabulary.
_PROBE = "The 12 cats, naïve ﬁsh: Ⅷ 中文 कि 한 🙂\n\tqzxj\u00a0e\u0301 \x01"


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Raise ValueError, in one line, for an error of a tokenizer inside the block."""
    try:
        yield
    except (InputError, OSError, MemoryError):
        raise
    except BaseException as error:
        if not (_is_panic(error) or (isinstance(error, Exception) and blames_input(error))):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"the tokenizer fails: {reason}") from error


def token_ids(tokenizer: Any, text: Any, **options: Any) -> Any:
    """Token ids of a text, or lists of them of several, by a tokenizer of transformers.

    Raises ValueError, in one line, for a tokenizer that fails.
    """
    with tokenizer_errors():
        return tokenizer(text, verbose=False, **options)["input_ids"]


def open_tokenizer(read: Callable[[], T]) -> T:
    """Open a tokenizer by ``read``, and let it read a few characters of every kind.

    ``T`` is one of transformers or of tokenizers. Raises ValueError for one that panics, whose
    steps turn a text into thousands of times its length, or that has thousands of steps.
    """
    with _without_panics(), tokenizer_errors():
        tokenizer: Any = read()
        fast = getattr(tokenizer, "backend_tokenizer", tokenizer)
        for part in _PARTS:
            state = getattr(getattr(fast, part, None), "__getstate__", lambda: None)()
            if isinstance(state, bytes):
                _check_part(part, json.loads(state))
        padding = getattr(fast, "padding", None) or {}
        for field in ("length", "pad_to_multiple_of"):
            if (padding.get(field) or 0) > _MOST_PADDING:
                raise InputError(
                    f"the tokenizer's padding must have {field} <= {_MOST_PADDING:,}; "
                    f"got {padding[field]:,}"
                )
        longest = getattr(tokenizer, "model_max_length", 0)
        if not isinstance(longest, int | float):
            raise InputError(f"model_max_length must be a number; got {longest!r:.80}")
        with suppress(Exception):  # words that it lacks are no fault of a tokenizer
            if hasattr(fast, "encode_batch_fast"):
                fast.decode(fast.encode(_PROBE).ids)
            else:
                tokenizer(_PROBE)
        return tokenizer


def _check_part(part: str, value: Any) -> None:
    steps = list(_steps(value))
    if len(steps) > _MOST_STEPS:
        raise InputError(f"the tokenizer's {part} must have <= {_MOST_STEPS:,} steps")
    growth = 1.0
    for step in steps:
        if isinstance(step.get("content"), str):  # replaces a pattern
            pattern = step.get("pattern")
            plain = pattern.get("String") if isinstance(pattern, dict) else None
            growth *= max(1.0, len(step["content"]) / max(1, len(plain or "")))
        elif isinstance(step.get("prepend"), str):
            growth *= max(1, len(step["prepend"]) / 16)  # a text's words are longer than that
    if growth > _MOST_GROWTH:
        raise InputError(
            f"the tokenizer's {part} makes a text more than {_MOST_GROWTH:,} times longer"
        )


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """Objects of a part of tokenizer.json, at any depth; its library refuses deep ones."""
    if isinstance(value, dict):
        yield value
        for inside in value.values():
            yield from _steps(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _steps(inside)


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"  # which no module exports


@contextmanager
def _without_panics() -> Iterator[None]:
    """Keep reports of panics off standard error; what else is written there follows at the end."""
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        panicked = False
        try:
            yield
        except ValueError as error:
            panicked = error.__cause__ is not None and _is_panic(error.__cause__)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            kept.seek(0)
            written = b"" if panicked else kept.read()
            if written:
                os.write(2, written)
