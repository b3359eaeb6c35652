"""Answers of a server that say which experts their tokens took: vLLM's and SGLang's."""

from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from l2r.errors import InputError
from l2r.files.reading import MAX_BYTES, parse_json, refuse_endless
from l2r.hf.routes import Fingerprint, Routes, from_sglang, from_vllm

_MEASURED = ("logprob", "expert")  # parts of the names of fields that hold measurements
_MAX_IDS = 1 << 31  # as engines count them
_LARGEST = torch.finfo(torch.float32).max
_READ = {"logprobs", "routed_experts", "input_token_logprobs", "output_token_logprobs"}


class Answers(NamedTuple):
    """rows: prompt and generated tokens of each choice. log_probs: of each row's next token, NaN
    where the server gave none. unread: names of fields with further experts or log-probabilities.
    """

    rows: list[Int[Tensor, " S"]]
    routes: Routes
    log_probs: list[Float[Tensor, " S"]]
    unread: tuple[str, ...] = ()


class _Choice(NamedTuple):
    """prompt and generated tokens, log-probabilities of the latter, or none, and routes."""

    prompt: list[int]
    tokens: list[int]
    given: list[float | None]
    routes: Routes


def read_answers(path: Path, fingerprint: Fingerprint, prompt_start: int = 0) -> Answers:
    """Read completions, one JSON object a line or a list of them.

    Each choice has ``prompt_token_ids`` (or its object has), ``token_ids`` and ``routed_experts``
    as vLLM answers with ``return_token_ids`` and ``--enable-return-routed-experts``, and may have
    ``logprobs``, those of a completion or of a chat. An object with ``meta_info`` is of SGLang's
    ``/generate``, asked with ``return_routed_experts``, ``return_logprob`` and
    ``logprob_start_len=0``. Raises ValueError for anything else, with the place.
    """
    rows, routes, log_probs, unread = [], [], [], set[str]()
    for number, answer in enumerate(_objects(path)):
        try:
            read = _sglang if "meta_info" in answer else _vllm
            for choice in read(answer, fingerprint, prompt_start):
                ids = [*choice.prompt, *choice.tokens]
                if not 0 <= min(ids) <= max(ids) < _MAX_IDS:
                    raise InputError(f"token ids must be >= 0 and < 2^31; got {ids!s:.80}")
                row = torch.tensor(ids)
                if choice.routes.lengths.tolist() != [len(row)]:
                    raise InputError(
                        f"routes must be of all tokens but the last: {len(row) - 1} are due; got "
                        f"{choice.routes.counts[0]} from token {prompt_start} on"
                    )
                log_probs.append(_next_log_probs(choice, len(row)))
                rows.append(row)
                routes.append(choice.routes)
            unread |= _unread(answer)
        except ValueError as error:
            raise InputError(f"{path}, answer {number}: {error}") from error
    if not rows:
        raise InputError(f"{path} must hold at least one answer; got none")
    return Answers(rows, Routes.concatenate(routes), log_probs, tuple(sorted(unread)))


def _vllm(answer: dict[str, Any], fingerprint: Fingerprint, prompt_start: int) -> Iterator[_Choice]:
    choices = answer.get("choices") or [{}]
    if not isinstance(choices, list):
        raise InputError(f"choices must be a list; got {type(choices).__name__}")
    for choice in choices:
        if not isinstance(choice, dict):
            raise InputError(f"a choice must be an object; got {choice!r}")
        prompt: Any = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
        tokens: Any = choice.get("token_ids")
        experts = choice.get("routed_experts")
        if not _are_ids(prompt) or not _are_ids(tokens) or not isinstance(experts, str):
            raise InputError(
                "a choice must have prompt_token_ids, token_ids (ask with return_token_ids) and "
                "routed_experts (serve with --enable-return-routed-experts); got "
                f"{', '.join(choice) or 'nothing'}"
            )
        logs = choice.get("logprobs") or {}
        if not isinstance(logs, dict):
            raise InputError(f"logprobs must be an object or null; got {type(logs).__name__}")
        given = _list(logs, "token_logprobs")
        if content := _list(logs, "content"):  # of a chat
            given = [_field(token, "logprob") for token in content]
        routes = from_vllm([experts], fingerprint, prompt_start=prompt_start)
        yield _Choice(prompt, tokens, given, routes)


def _sglang(
    answer: dict[str, Any], fingerprint: Fingerprint, prompt_start: int
) -> Iterator[_Choice]:
    meta: Any = answer["meta_info"]
    tokens: Any = answer.get("output_ids")
    before, after = _list(meta, "input_token_logprobs"), _list(meta, "output_token_logprobs")
    prompt: Any = [_item(entry, 1) for entry in before]
    whole = _field(meta, "prompt_tokens") in (None, len(prompt))
    if not whole or not _are_ids(prompt) or not _are_ids(tokens) or "routed_experts" not in meta:
        raise InputError(
            "an answer of SGLang must have output_ids, and in meta_info routed_experts "
            "(return_routed_experts, --enable-return-routed-experts) and input_token_logprobs of "
            "the whole prompt, which hold its token ids (return_logprob, logprob_start_len=0); "
            f"got {', '.join([*answer, *(meta if isinstance(meta, dict) else ())])}"
        )
    routes = from_sglang([answer], fingerprint, start_len=prompt_start)
    yield _Choice(prompt, tokens, [_item(entry, 0) for entry in after], routes)


def _next_log_probs(choice: _Choice, length: int) -> Float[Tensor, " S"]:
    given, tokens = choice.given, choice.tokens
    numbers = [value for value in given if value is not None]
    if not all(type(value) in (int, float) and abs(value) <= _LARGEST for value in numbers):
        raise InputError(f"log-probabilities must be float32 numbers or null; got {given!s:.80}")
    if given and len(given) != len(tokens):
        raise InputError(
            f"log-probabilities must be one per generated token, {len(tokens)}; got {len(given)}"
        )
    values = torch.full((length,), torch.nan)
    for place, value in enumerate(given, start=len(choice.prompt) - 1):
        values[place] = torch.nan if value is None else value
    return values


def _unread(answer: dict[str, Any]) -> set[str]:
    """Names of fields of an answer and its choices that hold measurements nobody reads."""
    parts: Sequence[Any] = (answer, *(answer.get("choices") or ()), answer.get("meta_info"))
    found = {
        name
        for part in parts
        for name, value in (part.items() if isinstance(part, dict) else ())
        if value and any(word in name for word in _MEASURED)
    }
    return found - _READ


def _lines(stream: BufferedReader) -> Iterator[bytes]:
    while line := stream.readline(MAX_BYTES + 1):
        if _at_most(line).strip():
            yield line


def _at_most(text: bytes) -> bytes:
    if len(text) > MAX_BYTES:
        raise InputError(f"a line must have at most {MAX_BYTES:,} bytes")
    return text


def _objects(path: Path) -> list[dict[str, Any]]:
    # Other ends of lines, U+2028 among them, may stand in a string of JSON.
    refuse_endless(path)
    try:
        with path.open("rb") as stream:
            if stream.peek(1024).lstrip().startswith(b"["):
                values = parse_json(_at_most(stream.read(MAX_BYTES + 1)), list, strict=False)
            else:
                values = [parse_json(line, strict=False) for line in _lines(stream)]
    except ValueError as error:
        raise InputError(f"{path} must hold one JSON object a line: {error}") from error
    if not all(isinstance(value, dict) for value in values):
        raise InputError(f"{path} must hold JSON objects, one for each answer")
    return values


def _field(part: Any, name: str) -> Any:
    return part.get(name) if isinstance(part, dict) else None


def _list(part: Any, name: str) -> list[Any]:
    """Return a field that is a list, null or not there."""
    value = _field(part, name)
    if not isinstance(value, list | None):
        raise InputError(f"{name} must be a list or null; got {type(value).__name__}")
    return value or []


def _item(entry: Any, place: int) -> Any:
    return entry[place] if isinstance(entry, list) and len(entry) > place else None


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)
