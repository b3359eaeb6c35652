"""Text for a checkpoint: a file, a folder, token files or the embedded corpus, as batches."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from l2r.data.corpus import CorpusOptions, build_corpus
from l2r.data.sample_text import packed_rows
from l2r.data.sources import folder_sources
from l2r.data.tokens import TokenDataset, read_documents


@dataclasses.dataclass(frozen=True)
class TextInput:
    """rows [I, S] of token ids, and the domain [I] of each (a position in ``domains``)."""

    rows: Tensor
    domain: Tensor
    domains: tuple[str, ...]

    def batches(self, size: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
        """Batches of ``input_ids`` [B, S] and ``domain`` [B]."""
        for start in range(0, len(self.rows), size):
            part = slice(start, start + size)
            yield {"input_ids": self.rows[part].to(device), "domain": self.domain[part].to(device)}


def open_text(
    source: str | None,
    tokenizer: Any,
    *,
    vocab_size: int,
    instances: int,
    length: int,
    report: Callable[[str], None] = lambda line: None,
) -> TextInput:
    """At most ``instances`` rows of ``length`` tokens, the same number from every domain.

    ``source``: a folder of token files, a folder of *.txt (a sub-folder per domain), a text
    file, or None for the held-out files of the embedded corpus.

    Raises ValueError for a missing source, tokens outside the vocabulary, a checkpoint without
    a tokenizer where text must be tokenized, or too little text.
    """
    if source is not None and (Path(source) / "manifest.json").is_file():
        return _from_token_files(Path(source), vocab_size, instances, length)
    if tokenizer is None:
        raise ValueError(
            "the checkpoint has no tokenizer, so text cannot be read; pass token files as data"
        )
    texts = _embedded(report) if source is None else _text_sources(Path(source))
    share = max(1, instances // len(texts))
    packed = [packed_rows(tokenizer, part, share * length, length) for part in texts.values()]
    rows = [(row, domain) for domain, part in enumerate(packed) for row in part]
    if not rows:
        raise ValueError(f"data must hold at least {length} tokens; got fewer in {source}")
    domain = torch.tensor([domain for _, domain in rows])
    return TextInput(torch.stack([row for row, _ in rows]), domain, tuple(texts))


def _from_token_files(folder: Path, vocab_size: int, instances: int, length: int) -> TextInput:
    dataset = TokenDataset(folder, length)
    chosen = np.linspace(0, len(dataset) - 1, min(len(dataset), instances)).astype(np.int64)
    rows = dataset.rows(chosen)
    largest = int(rows["input_ids"].max())
    if largest >= vocab_size:
        raise ValueError(
            f"token ids of {folder} must be below the checkpoint's vocab_size {vocab_size}; "
            f"got {largest}: they were made with another tokenizer"
        )
    return TextInput(rows["input_ids"], rows["domain"], dataset.domains)


def _embedded(report: Callable[[str], None]) -> dict[str, Iterable[str]]:
    """Held-out documents as text; a checkpoint's own tokenizer reads them again."""
    from tokenizers import Tokenizer

    corpus = build_corpus(CorpusOptions(), report=report)
    decode = Tokenizer.from_file(str(corpus.tokenizer / "tokenizer.json")).decode
    texts: dict[str, list[str]] = {}
    for domain, ids in read_documents(corpus.validation):
        texts.setdefault(domain, []).append(decode(ids.tolist()))
    return dict(texts)


def _text_sources(path: Path) -> dict[str, Iterable[str]]:
    if path.is_file():
        return {path.stem: [path.read_text(encoding="utf-8", errors="replace")]}
    return {name: (text for _, text in read()) for name, read in folder_sources(path).items()}
