"""Answers of a server that say which experts their tokens took (vLLM's completions)."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from l2r.hf.routes import Fingerprint, Routes, from_vllm


class Answers(NamedTuple):
    """rows: prompt and generated tokens of each choice. log_probs: of each row's next token, NaN
    where the server gave none."""

    rows: list[Int[Tensor, " S"]]
    routes: Routes
    log_probs: list[Float[Tensor, " S"]]


def read_answers(path: Path, fingerprint: Fingerprint, prompt_start: int = 0) -> Answers:
    """Read completions, one JSON object a line or a list of them.

    Each choice has ``prompt_token_ids`` (or its object has), ``token_ids`` and ``routed_experts``
    as vLLM answers with ``return_token_ids`` and ``--enable-return-routed-experts``, and may have
    ``logprobs.token_logprobs``. Raises ValueError for anything else, with the place.
    """
    rows, texts, log_probs = [], [], []
    for number, answer in enumerate(_objects(path)):
        for choice in answer.get("choices") or [{}]:
            where = f"{path}, answer {number}"
            if not isinstance(choice, dict):
                raise ValueError(f"{where}: a choice must be an object; got {choice!r}")
            prompt: Any = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            tokens: Any = choice.get("token_ids")
            experts = choice.get("routed_experts")
            if not _are_ids(prompt) or not _are_ids(tokens) or not isinstance(experts, str):
                raise ValueError(
                    f"{where}: a choice must have prompt_token_ids, token_ids (ask with "
                    "return_token_ids) and routed_experts (serve with "
                    f"--enable-return-routed-experts); got {', '.join(choice) or 'nothing'}"
                )
            row = torch.tensor([*prompt, *tokens])
            given = (choice.get("logprobs") or {}).get("token_logprobs") or []
            if any(not isinstance(value, int | float | None) for value in given):
                raise ValueError(f"{where}: token_logprobs must be numbers or null; got {given}")
            if given and len(given) != len(tokens):
                raise ValueError(
                    f"{where}: token_logprobs must be one per generated token, {len(tokens)}; "
                    f"got {len(given)}"
                )
            values = torch.full((len(row),), torch.nan)
            for place, value in enumerate(given, start=len(prompt) - 1):
                values[place] = torch.nan if value is None else value
            rows.append(row)
            texts.append(experts)
            log_probs.append(values)
    if not rows:
        raise ValueError(f"{path} must hold at least one answer; got none")
    return Answers(rows, from_vllm(texts, fingerprint, prompt_start=prompt_start), log_probs)


def _objects(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8").strip()
    lines = [text] if text.startswith("[") else text.splitlines()
    try:
        values = [json.loads(line) for line in lines if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must hold one JSON object a line: {error}") from error
    flat = values[0] if text.startswith("[") else values
    if not all(isinstance(value, dict) for value in flat):
        raise ValueError(f"{path} must hold JSON objects, one for each answer")
    return flat


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)
