"""Evaluate checkpoints on chosen text: read it, score it document by document, keep the results.

``evaluation/text-DIGEST.documents.jsonl`` of the results' folder has the settings in its first
line and then a line per document; it grows while documents are scored, so that a killed evaluation
resumes. ``evaluation/text-DIGEST.json`` has the numbers. DIGEST is of the text. Documents of any
length are scored by windows over their tokens.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.files.atomic import append_text, make_folder, write_json, write_text
from l2r.files.reading import parse_json
from l2r.files.wording import named_path
from l2r.hf.checkpoints import (
    Placement,
    checkpoint_digest,
    checkpoint_folder,
    load_config,
    load_pretrained,
    load_tokenizer,
    token_ids,
)
from l2r.routers.observe import evaluating
from l2r.routers.offload import device_of
from l2r.text.perplexity import token_losses
from l2r.text.sources import documents_by_file
from l2r.text.text_loss import TextDocument, TextSettings, Windows, text_losses

_PART = 1 << 20  # characters of text that are scored and kept together
_OWN = "text"  # name of a text that no file has
Tokens = Int[Tensor, "_"]
_LOGITS = 1 << 28  # of one forward pass: 1 GiB in float32


class Texts:
    """Documents of files and folders; read twice, so that none has to be held in memory.

    own: one text, in place of files. bytes: of all documents. Raises ValueError where there is no
    text or a limit below 1.
    """

    def __init__(
        self, paths: Sequence[Path], limit: int | None = None, *, own: str | None = None
    ) -> None:
        if limit is not None and limit < 1:
            raise InputError(f"limit must be >= 1; got {limit}")
        self.limit, self.own = limit, own
        names = {named_path(path).name: path for path in paths}
        self.paths = names if len(names) == len(paths) else {str(path): path for path in paths}
        sums, self.bytes = hashlib.sha256(), 0
        for file, document, text in self:
            content = text.encode()
            self.bytes += len(content)
            sums.update(repr((file, document, len(content))).encode() + content)
        if not self.bytes:
            what = "data" if own is None else "text"
            raise InputError(f"{what} must not be empty; got {', '.join(self.paths)}")
        self.digest = sums.hexdigest()

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        """File, name of the document and its text, which has no lone surrogates."""
        if self.own is not None:
            yield _OWN, _OWN, self.own
        for name, path in self.paths.items():
            for inside, documents in documents_by_file(path):
                file = f"{name}/{inside}" if path.is_dir() else name
                for document, text in islice(documents, self.limit):
                    yield file, document, text


def evaluate_text(
    checkpoint: Path,
    out: Path,
    texts: Texts,
    *,
    settings: TextSettings,
    batch_size: int,
    placement: Placement,
    trust_remote_code: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    expect: Callable[[float], object] = lambda share: None,
) -> tuple[tuple[TextDocument, ...], Path]:
    """All documents, scored, and the file that has the numbers.

    What an earlier call scored in ``out`` is not scored again.

    ``on_progress`` gets (bytes of text done, bytes in all), ``expect`` the share of the text that
    will be scored, before weights are loaded. Raises ValueError for a checkpoint that cannot be
    loaded or has no tokenizer, for sizes that do not fit, and for links in ``out``.
    """
    folder = checkpoint_folder(checkpoint)
    trusted = {"trust_remote_code": trust_remote_code}
    tokenizer, config = load_tokenizer(folder, **trusted), load_config(folder, **trusted)
    if tokenizer is None:
        raise InputError(f"a checkpoint needs a tokenizer to read text; {folder} has none")
    windows, start = settings.windows(config), start_token(tokenizer, config)
    identity = {**asdict(settings), "weights": checkpoint_digest(folder), "text": texts.digest}
    stem = make_folder(out, "evaluation") / f"text-{texts.digest[:8]}"
    path = stem.with_suffix(".documents.jsonl")
    scored = _scored(path, identity, texts)
    model, done = None, sum(document.bytes for document in scored)
    vocab_size = config.get_text_config().vocab_size
    for part in _parts(islice(texts, len(scored), None)):
        if model is None:
            expect(1 - done / texts.bytes)
            options = placement.options(folder)
            model = load_pretrained(folder, trust_remote_code=trust_remote_code, **options)
            model = placement.place(model)
            _begin(path, identity, scored)  # no file where nothing can be opened
        ids = [read_tokens(tokenizer, text, vocab_size) for _, _, text in part]
        sizes = [len(text.encode()) for _, _, text in part]
        losses = document_losses(
            model,
            ids,
            start=start,
            windows=windows,
            vocab_size=vocab_size,
            batch_size=batch_size,
            on_progress=_within(on_progress, done, sum(sizes), texts.bytes),
        )
        new = [
            TextDocument(file, document, nats, len(row), size, _digest(row))
            for (file, document, _), nats, row, size in zip(part, losses, ids, sizes, strict=True)
        ]
        append_text(path, "".join(f"{json.dumps(asdict(document))}\n" for document in new))
        scored += new
        done += sum(sizes)
    named = None if start is None else tokenizer.convert_ids_to_tokens(start)
    facts = {"checkpoint": named_path(checkpoint).name, "settings": {**identity, **asdict(windows)}}
    written = stem.with_suffix(".json")
    write_json(
        written,
        {
            **facts,
            "first_token_from": named,
            "texts": {name: loss.to_dict() for name, loss in text_losses(scored).items()},
        },
    )
    return tuple(scored), written


def _digest(ids: torch.Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]


def _parts(
    documents: Iterator[tuple[str, str, str]],
) -> Iterator[list[tuple[str, str, str]]]:
    part, size = list[tuple[str, str, str]](), 0
    for document in documents:
        part.append(document)
        size += len(document[2])
        if size >= _PART:
            yield part
            part, size = [], 0
    if part:
        yield part


def _within(
    report: Callable[[int, int], None], before: int, size: int, total: int
) -> Callable[[int, int], None]:
    """Progress of a part as progress of the whole."""
    return lambda done, of: report(before + size * done // of, total)


def _scored(path: Path, identity: dict[str, Any], texts: Texts) -> list[TextDocument]:
    """Documents that an earlier run scored, the first of ``texts`` in their order.

    A line cut by a crash is dropped with those behind it, as are those of a second process.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    documents = list[TextDocument]()
    if lines and lines[0] == json.dumps(identity):
        for line, (file, document, text) in zip(lines[1:], texts, strict=False):
            try:
                kept = TextDocument(**parse_json(line.encode()))
            except (ValueError, TypeError):
                break
            if (kept.file, kept.document, kept.bytes) != (file, document, len(text.encode())):
                break
            documents.append(kept)
    return documents


def _begin(path: Path, identity: dict[str, Any], documents: Sequence[TextDocument]) -> None:
    """Write the file of scored documents anew, so that more can be added."""
    kept = [json.dumps(identity), *(json.dumps(asdict(document)) for document in documents)]
    write_text(path, "".join(f"{line}\n" for line in kept))


def start_token(tokenizer: Any, config: Any) -> int | None:
    """Find the token before a document's first, from which that is predicted; None without one.

    The token that the tokenizer itself puts before a text, or end-of-text, which precedes a
    document where documents are packed.
    """
    bos = tokenizer.bos_token_id
    if bos is not None and token_ids(tokenizer, "a")[:1] == [bos]:
        return int(bos)
    if tokenizer.eos_token_id is not None:
        return int(tokenizer.eos_token_id)
    eos = config.eos_token_id
    return eos if isinstance(eos, int) and eos < config.get_text_config().vocab_size else None


def read_tokens(tokenizer: Any, text: str, vocab_size: int) -> Tokens:
    """Token ids of a text, in which the names of special tokens are text.

    Raises ValueError for ids outside the vocabulary.
    """
    options = {"add_special_tokens": False, "split_special_tokens": True}
    ids: list[int] = token_ids(tokenizer, text, **options)
    if ids and max(ids) >= vocab_size:
        raise InputError(
            f"token ids must be below the checkpoint's vocab_size {vocab_size}; got {max(ids)}"
        )
    return torch.tensor(ids, dtype=torch.int32)


def document_losses(
    model: nn.Module,
    documents: Sequence[Tokens],
    *,
    start: int | None,
    windows: Windows,
    vocab_size: int,
    batch_size: int = 8,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[float]:
    """Minus log-probability of each document in nats, summed over all of its tokens.

    start: token before the first of a document; without one that first token counts as a uniform
    guess. batch_size: windows per forward pass, fewer where their logits would take over 1 GiB.
    on_progress: gets (windows done, windows in all). Raises ValueError where the model gives no
    numbers.
    """
    if batch_size < 1:
        raise InputError(f"batch_size must be >= 1; got {batch_size}")
    if start is not None and start >= vocab_size:
        raise InputError(f"end-of-text must be below vocab_size {vocab_size}; got {start}")
    device = device_of(model)
    prefix = torch.tensor([] if start is None else [start], dtype=torch.int32)
    rows = [torch.cat([prefix, ids]) for ids in documents]
    guess = math.log(vocab_size) if start is None else 0.0
    losses = [guess if len(ids) else 0.0 for ids in documents]
    cuts = [(number, *cut) for number, row in enumerate(rows) for cut in windows.over(len(row))]
    cuts.sort(key=lambda cut: cut[1] - cut[3])  # the longest first, so that rows are alike
    size = max(1, min(batch_size, _LOGITS // (windows.context * vocab_size)))
    with evaluating(model), torch.no_grad():
        for at in range(0, len(cuts), size):
            batch = cuts[at : at + size]
            parts = [rows[number][first:end] for number, first, _, end in batch]
            # Padding is on the right, where a causal model never looks, so no mask is needed.
            ids = nn.utils.rnn.pad_sequence([part.long() for part in parts], batch_first=True)
            scores = token_losses(model, ids.to(device)).double().cpu()
            for row, (number, first, scored, end) in zip(scores, batch, strict=True):
                losses[number] += float(row[scored - first - 1 : end - first - 1].sum())
            on_progress(at + len(batch), len(cuts))
    if not all(map(math.isfinite, losses)):
        raise InputError("the model gives log-likelihoods that are not numbers on this text")
    return losses
