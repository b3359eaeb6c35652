"""The embedded corpus: text to a small BPE tokenizer and memory-mapped tokens, cached.

A folder per corpus: ``tokenizer/`` (Hugging Face format), ``train/`` and ``validation/`` (token
files of l2r.text.tokens). The same sources and options give the same bytes. For
models with a tokenizer of their own the held-out text is kept by itself, in a file beside them.
A checkpoint that was trained on a corpus is measured on the held-out part of it.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from l2r.errors import using
from l2r.files.atomic import folder_beside, write_json
from l2r.files.cache import cache_folder
from l2r.files.folder import RunFolder
from l2r.files.reading import read_json
from l2r.laboratory import of_laboratory
from l2r.text.held_out import NEWEST, NamedTexts, split_files
from l2r.text.new_tokenizer import write_new_tokenizer
from l2r.text.sources import (
    Files,
    embedded_sources,
    embedded_versions,
    folder_files,
    folder_sources,
    package_version,
)
from l2r.text.token_writer import write_token_files


@dataclass(frozen=True)
class CorpusOptions:
    """folder: a user's text folder, None for the embedded text.

    vocab_size: of the byte-level BPE. characters_per_domain: domains are cut to this many
    characters, so that the mixture is even. version: of the rules by which text is chosen and held
    out (held_out.py, sources.py); part of the cache key, raised when they change.
    """

    folder: str | None = None
    vocab_size: int = 4096
    characters_per_domain: int = 4_000_000
    version: int = NEWEST

    def described(self) -> dict[str, Any]:
        """Options as the corpus keeps them; version 1 had no such field."""
        fields = asdict(self)
        return {n: v for n, v in fields.items() if n != "version"} if self.version == 1 else fields

    def sources(self) -> dict[str, Callable[[], Files]]:
        """Domain name to a function that yields its files."""
        if self.folder is None:
            return embedded_sources(self.version)
        return folder_sources(Path(self.folder), self.version)


class Corpus(NamedTuple):
    """Folders of a built corpus: a tokenizer in Hugging Face format, and the token files.

    train: for training. validation: of the held-out files.
    """

    tokenizer: Path
    train: Path
    validation: Path


def build_corpus(
    options: CorpusOptions,
    *,
    cache: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """Build the corpus or find it in the cache (``L2R_CACHE``, else ``~/.cache/l2r``).

    Built in a temporary folder and renamed, so a killed build leaves nothing behind that could
    be mistaken for a corpus; of two builds at the same time the first stays.

    Raises ValueError for an empty or missing text folder.
    """
    cache = cache or cache_folder()
    target = _folder(cache, options)
    if not (target / "corpus.json").is_file():
        with using(cache), folder_beside(target) as folder:
            _build(folder, options, report)
            try:
                folder.rename(target)
            except OSError:  # refused where a folder with files is: another process's, or ruins
                if not (target / "corpus.json").is_file():
                    shutil.rmtree(target)
                    folder.rename(target)
    return Corpus(target / "tokenizer", target / "train", target / "validation")


def held_out_texts(
    options: CorpusOptions,
    *,
    cache: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, list[str]]:
    """Held-out texts of every domain, in the order of the corpus; no tokenizer is trained for them.

    Taken from the corpus where it is built, else from the sources, once: the cache keeps them.

    Raises ValueError as ``split_corpus`` does.
    """
    cache = cache or cache_folder()
    target = _folder(cache, options)
    if (target / "corpus.json").is_file():
        return _decoded(target)
    same = replace(options, vocab_size=CorpusOptions.vocab_size)  # of any vocabulary
    path = cache / f"held-out-{_fingerprint(same)}.json"
    if not path.is_file():
        write_json(path, split_corpus(options, report)[1])
    return read_json(path)


def split_corpus(
    options: CorpusOptions, report: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Training and held-out texts of every domain.

    Raises ValueError for an empty or missing text folder, and a domain that cannot be split.
    """
    train, validation = split_documents(options, report)
    return _texts(train), _texts(validation)


def split_documents(
    options: CorpusOptions, report: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, NamedTexts], dict[str, NamedTexts]]:
    """Split the texts of every domain, each with its name."""
    train: dict[str, NamedTexts] = {}
    validation: dict[str, NamedTexts] = {}
    cut = options.characters_per_domain
    for domain, files in options.sources().items():
        report(f"reading {domain}")
        train[domain], validation[domain] = split_files(
            files(), cut, domain=domain, version=options.version
        )
    return train, validation


def _texts(domains: dict[str, NamedTexts]) -> dict[str, list[str]]:
    return {domain: [text for _, text in named] for domain, named in domains.items()}


def _build(folder: Path, options: CorpusOptions, report: Callable[[str], None]) -> None:
    splits = dict(zip(("train", "validation"), split_corpus(options, report), strict=True))
    report(f"training a tokenizer of {options.vocab_size} tokens")
    texts = (text for domain in splits["train"].values() for text in domain)
    tokenizer, identity = write_new_tokenizer(folder / "tokenizer", texts, options.vocab_size)
    for split, domains in splits.items():
        report(f"tokenizing {split}")
        encoded = {
            domain: (encoding.ids for encoding in tokenizer.encode_batch_fast(texts))
            for domain, texts in domains.items()
        }
        write_token_files(folder / split, encoded, tokenizer=identity, source=options.described())
    (folder / "corpus.json").write_text(json.dumps(options.described(), indent=2) + "\n")


def _decoded(corpus: Path) -> dict[str, list[str]]:
    from tokenizers import Tokenizer

    from l2r.text.tokens import read_documents  # with torch, which the rest does without

    decode = Tokenizer.from_file(str(corpus / "tokenizer" / "tokenizer.json")).decode
    texts: dict[str, list[str]] = {}
    for domain, ids in read_documents(corpus / "validation"):
        texts.setdefault(domain, []).append(decode(ids.tolist()))
    return texts


def _folder(cache: Path, options: CorpusOptions) -> Path:
    return cache / f"corpus-{_fingerprint(options)}"


def _fingerprint(options: CorpusOptions) -> str:
    """Hash the options, the names and sizes of a user's files, and the packages' versions.

    The embedded text is the packages' own, and the same text can give another vocabulary under
    another tokenizers.
    """
    domains, tokenizers = sorted(options.sources()), package_version("tokenizers")
    parts: list[Any] = [options.version, options.described(), domains, tokenizers]
    if options.folder is None:
        parts.append(embedded_versions())
    else:
        folder = Path(options.folder)
        parts.append(
            [
                (str(p), p.stat().st_size, p.stat().st_mtime_ns)
                for p in folder_files(folder, options.version)
            ]
        )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def unseen_part(
    checkpoint: str | Path | None, folder: str | Path | None = None
) -> CorpusOptions | None:
    """Corpus of ``folder``, or embedded without one, whose held-out part is new to a checkpoint.

    A run that was trained on this text has its own cut and version, which the laboratory reads
    from its recipe. Of other checkpoints, and without the laboratory: the newest embedded corpus,
    and None for a folder, all of which may be new to them.
    """
    newest = CorpusOptions() if folder is None else None
    run = None if checkpoint is None else _run_of(Path(checkpoint))
    corpus_of_run = None if run is None else of_laboratory("training", "corpus_of_run")
    options = None if corpus_of_run is None else corpus_of_run(run)
    if options is None or run is None or not _same(options.folder, folder, run):
        return newest
    options = replace(options, folder=None if folder is None else str(folder))
    # since version 2 the whole hold-out is new to it, whatever cut it was trained on
    return newest if newest and options.version == newest.version else options


def _run_of(path: Path) -> RunFolder | None:
    """Find the run that a path names, or whose ``model/`` or ``model-ema/`` it names."""
    path = path.absolute()
    run, above = RunFolder(path), RunFolder(path.parent)
    if run.is_run():
        return run
    return above if above.is_run() and path in (above.model, above.averaged_model) else None


def _same(own: str | None, folder: str | Path | None, run: RunFolder) -> bool:
    """Say whether a run's corpus is a folder; one as it was typed, in a folder above the run."""
    if own is None or folder is None:
        return own is folder
    started = [Path.cwd(), *run.path.resolve().parents]
    return Path(folder).resolve() in [(place / own).resolve() for place in started]
