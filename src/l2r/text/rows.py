"""Rows of tokens that stand for a whole: of token files, and of text in a model's own tokens."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from l2r.errors import InputError
from l2r.hf.checkpoints import token_ids
from l2r.text.corpus import CorpusOptions, split_documents
from l2r.text.tokens import TokenDataset

ChooseRows = Callable[[TokenDataset, int], Int[np.ndarray, " rows"]]
_CHARACTERS = 8  # of a token: generous, so that a text is seldom tokenized again
_EDGE = 16  # tokens at the end of a text that is cut, where the cut shows
_LINE = re.compile(r":\d+$")  # text_documents names the documents of a file FILE:LINE


def spread_evenly(size: int, count: int) -> Int[np.ndarray, " rows"]:
    """At most ``count`` positions in ``range(size)``, in order, the first and the last included."""
    return np.linspace(0, size - 1, min(size, count)).astype(np.int64)


def even_rows(dataset: TokenDataset, count: int) -> Int[np.ndarray, " rows"]:
    """At most ``count`` rows in order, spread evenly over all files: domains by their size."""
    return spread_evenly(len(dataset), count)


def balanced_rows(dataset: TokenDataset, count: int) -> Int[np.ndarray, " rows"]:
    """``count`` rows in order, the same number from every domain, spread evenly over its files.

    Numbers differ by one where ``count`` is no multiple of the domains. A domain with fewer rows
    gives all, and the others share the rest; every domain that has a row gives at least one, even
    where that makes more than ``count``.
    """
    parts = [dataset.domain_rows(domain) for domain in dataset.domains]
    sizes = [sum(map(len, ranges)) for ranges in parts]
    chosen = [
        _rows_at(ranges, spread_evenly(size, share))
        for ranges, size, share in zip(parts, sizes, _shares(sizes, count), strict=True)
        if share
    ]
    return np.sort(np.concatenate(chosen))


def name_domains_without_rows(dataset: TokenDataset, report: Callable[[str], None]) -> None:
    """Report every domain whose files hold no whole row."""
    for domain in dataset.domains:
        if not any(dataset.domain_rows(domain)):
            report(too_small_domain(domain, dataset.sequence_length))


def too_small_domain(domain: str, length: int) -> str:
    """Write the line that names a domain with too few tokens."""
    return f"domain {domain} holds less than one row of {length} tokens: it is left out"


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """``count`` dealt as evenly as ``sizes`` allow, at least one for each that is not 0."""
    shares = [0] * len(sizes)
    left = max(count, sum(size > 0 for size in sizes))
    smallest_first = sorted(range(len(sizes)), key=lambda index: sizes[index])
    for done, index in enumerate(smallest_first):
        shares[index] = min(sizes[index], left // (len(sizes) - done))
        left -= shares[index]
    return shares


def _rows_at(
    ranges: Sequence[range], positions: Int[np.ndarray, " rows"]
) -> Int[np.ndarray, " rows"]:
    """Rows at ``positions`` of the ranges joined."""
    ends = np.cumsum([len(part) for part in ranges])
    which = np.searchsorted(ends, positions, side="right")
    first = np.array([part.start for part in ranges]) - ends + [len(part) for part in ranges]
    return first[which] + positions


class SpreadRows(NamedTuple):
    """Rows of some files. files: number of those that were read. of: number of all."""

    rows: list[Int[Tensor, " S"]]
    files: int
    of: int


def read_line(tokens: int, files: int, of: int, unit: str = "files") -> str:
    """Write the line of a command on the text that it read."""
    return f"read {tokens:,} tokens of {files:,} of {of:,} {unit}"


def sample_batches(
    tokenizer: Any,
    *,
    corpus: CorpusOptions | None = None,
    tokens: int = 200_000,
    held_out_tokens: int = 50_000,
    sequence_length: int = 256,
    batch_size: int = 8,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Batches [B, S] of token ids for fitting, and others from files that are held out.

    ``corpus``: whose text and whose split, the newest embedded one by default; its vocabulary is
    not used. Domains come in turns, in equal parts, each spread over its files. ``report`` gets a
    line for either part. Raises ValueError when there is too little text for one row, or sizes too
    small.
    """
    # One token predicts nothing, so a row has two.
    for name, value, least in (
        ("sequence_length", sequence_length, 2),
        ("batch_size", batch_size, 1),
        ("tokens", tokens, 1),
        ("held_out_tokens", held_out_tokens, 1),
    ):
        if value < least:
            raise InputError(f"{name} must be >= {least}; got {value}")
    parts = []
    splits = split_documents(corpus or CorpusOptions())
    uses = ("to fit on", "to measure on")
    for domains, budget, use in zip(splits, (tokens, held_out_tokens), uses, strict=True):
        share = max(budget // len(domains) // sequence_length, 1)
        spread = [
            spread_rows(tokenizer, by_file(documents), share, sequence_length)
            for documents in domains.values()
        ]
        turns = zip_longest(*(part.rows for part in spread))
        mixed = [row for row in chain.from_iterable(turns) if row is not None]
        if not mixed:
            raise InputError(f"the text must give at least {sequence_length} tokens; got fewer")
        files, of = sum(part.files for part in spread), sum(part.of for part in spread)
        report(f"{read_line(len(mixed) * sequence_length, files, of)} {use}")
        parts.append(list(torch.split(torch.stack(mixed), batch_size)))
    return parts[0], parts[1]


def by_file(documents: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Texts of every file, of named documents as ``text_documents`` gives them."""
    files: dict[str, list[str]] = {}
    for name, text in documents:
        files.setdefault(_LINE.sub("", name), []).append(text)
    return list(files.values())


def spread_rows(
    tokenizer: Any, files: Sequence[Iterable[str]], count: int, length: int
) -> SpreadRows:
    """At most ``count`` rows [``length``] of the documents of files, spread over the files.

    Files give a row each in turns, in order of ``files``; where there are more files than rows,
    those that lie evenly. A file's documents follow one another, an end-of-text token after each.
    What is left at the ends of files, and files shorter than a row, are packed one after another.
    No more text is read than it takes.
    """
    first = spread_evenly(len(files), count).tolist()
    waiting = [*first, *sorted(set(range(len(files))) - set(first))]
    need = _CHARACTERS * length * (count // max(1, len(files)) + 1)
    streams = [_rows_of(tokenizer, texts, length, need) for texts in files]
    rows: list[tuple[int, list[int]]] = []
    ends: list[tuple[int, list[int]]] = []
    left = 0  # tokens in ends
    while waiting and len(rows) + left // length < count:
        still = []
        for file in waiting:
            if len(rows) + left // length >= count:
                break
            ids: list[int] = next(streams[file], [])
            if len(ids) == length:
                rows.append((file, ids))
                still.append(file)
            elif ids:
                ends.append((file, ids))
                left += len(ids)
        waiting = still
    rows.sort(key=lambda row: row[0])  # stable: the rows of a file stay in order
    used = {file for file, _ in rows}
    buffer: list[int] = []
    for file, rest in sorted(ends, key=lambda end: end[0]):
        if len(rows) < count and left >= length:
            used.add(file)
        buffer += rest
        if len(buffer) >= length and len(rows) < count:  # each end is shorter than a row
            rows.append((file, buffer[:length]))
            buffer, left = buffer[length:], left - length
    return SpreadRows([torch.tensor(ids) for _, ids in rows], len(used), len(files))


def _rows_of(
    tokenizer: Any, texts: Iterable[str], length: int, characters: int
) -> Iterator[list[int]]:
    """Rows of ``length`` token ids of a file, and what is left at its end."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    buffer: list[int] = []
    for text in texts:
        for ids in _token_ids(tokenizer, text, characters):
            buffer += ids
            whole = len(buffer) - len(buffer) % length
            yield from (buffer[at : at + length] for at in range(0, whole, length))
            buffer = buffer[whole:]
        buffer += end
    yield from (buffer[at : at + length] for at in range(0, len(buffer), length))


def _token_ids(tokenizer: Any, text: str, characters: int) -> Iterator[list[int]]:
    """Token ids of a text in parts, so that a long one is read as far as it is needed."""
    done = 0
    while True:
        ids = token_ids(tokenizer, text[:characters], add_special_tokens=False)
        is_cut = characters < len(text)
        end = max(done, len(ids) - _EDGE) if is_cut else len(ids)
        yield ids[done:end]
        if not is_cut:
            return
        done, characters = end, 4 * characters
