"""Trains a small byte-level BPE on text, and writes it as a Hugging Face tokenizer."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from l2r.errors import InputError
from l2r.files.atomic import write_text
from l2r.files.reading import file_sha256
from l2r.text.manifest import TokenizerIdentity
from l2r.text.tokenizer import write_tokenizer_config

END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"
MIN_VOCABULARY = 300  # 256 bytes, two special tokens, and some to learn
MAX_VOCABULARY = 2**24  # a larger table ends the process of tokenizers


def write_new_tokenizer(
    folder: Path, texts: Iterable[str], vocab_size: int
) -> tuple[Tokenizer, TokenizerIdentity]:
    """Train a tokenizer and write ``tokenizer.json`` and ``tokenizer_config.json``.

    Little text gives fewer than ``vocab_size`` tokens. Raises ValueError for fewer than 300 and
    more than 2^24.
    """
    if not MIN_VOCABULARY <= vocab_size <= MAX_VOCABULARY:
        raise InputError(
            f"vocab_size must be >= {MIN_VOCABULARY} and <= {MAX_VOCABULARY}; got {vocab_size}"
        )
    tokenizer = _train(texts, vocab_size)
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_tokenizer_config(folder, END_OF_TEXT, PADDING)
    return tokenizer, TokenizerIdentity(
        name=f"bpe-{vocab_size}",
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_id=int(tokenizer.token_to_id(END_OF_TEXT) or 0),
        sha256=file_sha256(folder / "tokenizer.json"),
    )


def _train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
