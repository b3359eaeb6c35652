"""Load any Hugging Face causal language model folder, ours included."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load_causal_lm(path: str | Path, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Model in evaluation mode and its tokenizer, or None where the folder has none.

    ``path`` is a folder in Hugging Face format, or a run folder of ours (its ``model/``).
    Raises ValueError when the folder holds no readable checkpoint.
    """
    folder = checkpoint_folder(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot load a language model from {folder}: {error}") from error
    has_tokenizer = any((folder / n).exists() for n in ("tokenizer.json", "tokenizer_config.json"))
    tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None
    return model.eval(), tokenizer


def checkpoint_folder(path: str | Path) -> Path:
    """The Hugging Face folder meant by ``path``: itself, or ``model/`` of a run folder."""
    for folder in (Path(path), Path(path) / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise ValueError(
        f"checkpoint must be a folder with config.json or model/config.json; got {path}"
    )
