"""Subject of a diagnosis: a checkpoint of either kind with the data that it reads."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.hf.checkpoints import (
    FLOAT32,
    Placement,
    is_image_classifier,
    load_causal_lm,
    load_image_classifier,
    token_ids,
)
from l2r.routers.offload import device_of
from l2r.text import (
    TokenDataset,
    balanced_rows,
    embedded_sample,
    file_texts,
    held_out_texts,
    name_domains_without_rows,
    read_line,
    spread_rows,
    too_small_domain,
    unseen_part,
)

if TYPE_CHECKING:
    from l2r.images import ImageInput

MIN_TOKENS = 2  # of a row: one token predicts nothing

# Rows [I, S] of token ids, the domain [I] of each, and the domains' names.
TextBatch = tuple[Tensor, Tensor, tuple[str, ...]]


@dataclass(frozen=True)
class DiagnosisSubject:
    """A model, its batches by (size, device), how many items there are, and their domains.

    images: where an image classifier's batches come from. tokenizer: of a language model, where
    the checkpoint has one.
    """

    model: nn.Module
    batches: Callable[[int, torch.device], Iterator[dict[str, Tensor]]]
    items: int
    domains: tuple[str, ...]
    options: dict[str, Any]
    images: "ImageInput | None" = None
    tokenizer: Any = None

    @property
    def device(self) -> torch.device:
        """Device that the model computes on."""
        return device_of(self.model)

    def run(self, model: nn.Module, inputs: dict[str, Tensor]) -> Any:
        """One forward pass; ``targets`` and ``domain`` are not for the model."""
        arguments = {name: v for name, v in inputs.items() if name not in ("targets", "domain")}
        return model(**arguments, **self.options)


def open_subject(
    checkpoint: str | Path,
    data: str | None,
    *,
    text: str | None = None,
    instances: int,
    length: int,
    report: Callable[[str], None],
    placement: Placement = FLOAT32,
    trust_remote_code: bool = False,
    held_out: bool = True,
) -> DiagnosisSubject:
    """Load a checkpoint and the text or the images that it reads.

    ``text``, ``held_out``: see ``open_text``.

    Raises ValueError for folders that hold neither, and for data that does not fit.
    """
    if is_image_classifier(checkpoint):
        from l2r.images import open_image_input  # text needs no image package

        model = load_image_classifier(
            checkpoint, placement=placement, trust_remote_code=trust_remote_code
        )
        images = open_image_input(checkpoint, model.config, data)
        count = min(instances, len(images.dataset))
        say_once = cache(report)  # a diagnosis reads the images several times

        def batches(size: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
            return images.batches(count, size, device, say_once)

        return DiagnosisSubject(model, batches, count, images.domains, {}, images)
    model, tokenizer = load_causal_lm(
        checkpoint, placement=placement, trust_remote_code=trust_remote_code
    )
    rows, domain, domains = open_text(
        data,
        tokenizer,
        text=text,
        checkpoint=checkpoint,
        vocab_size=model.config.get_text_config().vocab_size,
        instances=instances,
        length=length,
        report=report,
        held_out=held_out,
    )

    def text_batches(size: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
        for part, of in zip(torch.split(rows, size), torch.split(domain, size), strict=True):
            yield {"input_ids": part.to(device), "domain": of.to(device)}

    options = {"use_cache": False}
    return DiagnosisSubject(model, text_batches, len(rows), domains, options, tokenizer=tokenizer)


def open_text(
    source: str | None,
    tokenizer: Any,
    *,
    text: str | None = None,
    checkpoint: str | Path | None = None,
    vocab_size: int,
    instances: int,
    length: int,
    report: Callable[[str], None],
    held_out: bool = True,
) -> TextBatch:
    """Open about ``instances`` rows of ``length`` tokens, as many from every domain (1 or more).

    The rows of a domain are spread over its files.

    ``source``: a folder of token files, a file or a folder of text (data/sources.py), or None
    for the held-out part of the embedded corpus. ``text``: a string that is read in its place, as
    one row of its own length where it is shorter than ``length``. Of text that ``checkpoint``, a
    run, was trained on, the part is taken that it held out. ``held_out=False``: embedded text
    that a run may have seen will do, which takes no half a minute to find. ``report`` gets a line
    for every domain that has no whole row, and one of what was read.

    Raises ValueError for a missing source, tokens outside the vocabulary, a checkpoint without
    a tokenizer where text must be tokenized, or too little text.
    """
    if source is not None and (Path(source) / "manifest.json").is_file():
        return _from_token_files(Path(source), vocab_size, instances, length, report)
    if tokenizer is None:
        raise InputError(
            "the checkpoint has no tokenizer, so text cannot be read; pass token files as data"
        )
    if text is not None:
        return _from_string(text, tokenizer, instances, length, report)
    corpus = unseen_part(checkpoint, source)
    texts: Mapping[str, Sequence[Iterable[str]]]
    unit = "files"
    if corpus is None:
        texts = file_texts(Path(str(source)))
    elif source is None and not held_out:
        texts = {name: [part] for name, part in embedded_sample().items()}
    else:
        held = held_out_texts(corpus, report=report)
        texts = {name: [[text] for text in part] for name, part in held.items()}
        unit = "held-out texts"
    share = max(1, instances // len(texts))
    spread = [spread_rows(tokenizer, files, share, length) for files in texts.values()]
    rows = []
    for domain, (name, part) in enumerate(zip(texts, spread, strict=True)):
        of_domain = [(row, domain) for row in part.rows]
        if not of_domain:
            report(too_small_domain(name, length))
        rows += of_domain
    if not rows:
        raise InputError(f"data must hold at least {length} tokens; got fewer in {source}")
    tokens, files = len(rows) * length, sum(part.files for part in spread)
    if source is None and not held_out:  # the files of the packages are not counted
        report(f"read {tokens:,} tokens of the embedded corpus")
    else:
        report(read_line(tokens, files, sum(part.of for part in spread), unit))
    labels = torch.tensor([domain for _, domain in rows])
    return torch.stack([row for row, _ in rows]), labels, tuple(texts)


def rows_of_text(tokens: int, instances: int, length: int) -> tuple[int, int]:
    """Rows that are read of a text of so many tokens, and their length."""
    length = min(length, tokens)
    return min(instances, tokens // length), length


def _from_string(
    text: str, tokenizer: Any, instances: int, length: int, report: Callable[[str], None]
) -> TextBatch:
    ids = token_ids(tokenizer, text, add_special_tokens=False)
    if len(ids) < MIN_TOKENS:
        raise InputError(f"text must have at least {MIN_TOKENS} tokens; got {len(ids)}")
    count, length = rows_of_text(len(ids), instances, length)
    report(f"read {count * length:,} tokens of the text")
    return (
        torch.tensor(ids[: count * length]).view(count, length),
        torch.zeros(count).long(),
        ("text",),
    )


def _from_token_files(
    folder: Path, vocab_size: int, instances: int, length: int, report: Callable[[str], None]
) -> TextBatch:
    dataset = TokenDataset(folder, length)
    name_domains_without_rows(dataset, report)
    chosen = balanced_rows(dataset, instances)
    rows = dataset.rows(chosen)
    largest = int(rows["input_ids"].max())
    if largest >= vocab_size:
        raise InputError(
            f"token ids of {folder} must be below the checkpoint's vocab_size {vocab_size}; "
            f"got {largest}: they were made with another tokenizer"
        )
    report(read_line(rows["input_ids"].numel(), *dataset.files_of(chosen)))
    return rows["input_ids"], rows["domain"], dataset.domains
