"""``manifest.json``: what a folder of token files holds, with checksums."""

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from l2r.errors import InputError
from l2r.files.atomic import write_json
from l2r.files.reading import parse_json, read_bytes

T = TypeVar("T")

MANIFEST = "manifest.json"
FORMAT = "l2r-tokens-1"
ENDS = np.dtype("<u8")  # of the offsets in NAME.ends
_LARGEST_VOCABULARY = 1 << 24  # 64 times the largest in use; a model has a row for every entry
# A plain name: no folders, no leading dot, so a manifest cannot point outside its folder.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


@dataclass(frozen=True)
class TokenizerIdentity:
    """Tokenizer of the tokens. ``sha256`` is of its tokenizer.json, empty if unknown."""

    name: str
    vocab_size: int
    eos_token_id: int
    sha256: str = ""

    def is_same(self, other: "TokenizerIdentity") -> bool:
        """Tell whether both make the same ids: by content if that is known, else by all fields."""
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return self == other

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest little-endian type that holds every token id."""
        return np.dtype("<u2") if self.vocab_size <= 2**16 else np.dtype("<u4")


@dataclass(frozen=True)
class TokenFile:
    """One ``NAME.bin`` (token ids) with its ``NAME.ends`` (end offset of each document, uint64)."""

    name: str
    domain: str
    tokens: int
    documents: int
    sha256: str
    ends_sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a token folder; ``source`` is free text about where the text came from."""

    tokenizer: TokenizerIdentity
    files: tuple[TokenFile, ...]
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens in all files."""
        return sum(file.tokens for file in self.files)

    def by_domain(self) -> dict[str, tuple[int, int]]:
        """Documents and tokens of every domain, in the order of the files."""
        domains: dict[str, tuple[int, int]] = {}
        for file in self.files:
            documents, tokens = domains.get(file.domain, (0, 0))
            domains[file.domain] = (documents + file.documents, tokens + file.tokens)
        return domains


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` whole or not at all."""
    write_json(
        folder / MANIFEST,
        {
            "format": FORMAT,
            "tokens": manifest.tokens,
            "dtype": manifest.tokenizer.dtype.name,
            **dataclasses.asdict(manifest),
        },
    )


def read_manifest(folder: Path) -> Manifest:
    """Read ``manifest.json``.

    Raises ValueError when it is missing, unreadable, of another format, lists no files, or names
    a file outside its folder.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise InputError(f"{folder} has no {MANIFEST}; write token files with l2r data prepare")
    try:
        values = parse_json(read_bytes(path))
        if values["format"] != FORMAT:
            raise InputError(f"format must be {FORMAT!r}; got {values['format']!r}")
        manifest = Manifest(
            tokenizer=typed(TokenizerIdentity, values["tokenizer"]),
            files=tuple(typed(TokenFile, entry) for entry in values["files"]),
            source=dict(values.get("source", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not a token manifest: {error}") from error
    tokenizer = manifest.tokenizer
    if not 0 <= tokenizer.eos_token_id < tokenizer.vocab_size <= _LARGEST_VOCABULARY:
        raise InputError(
            f"{path} is not a token manifest: it must have 0 <= eos_token_id < vocab_size <= "
            f"{_LARGEST_VOCABULARY}; got {tokenizer.eos_token_id} and {tokenizer.vocab_size}"
        )
    if not manifest.files:
        raise InputError(f"{path} lists no token files; the folder is empty")
    for file in manifest.files:
        check_plain_name(file.name, where=str(path))
    return manifest


def typed(kind: type[T], values: Any) -> T:
    """Read a dataclass of texts and counts from a JSON object. Raises TypeError or ValueError.

    A count is an integer and not negative.
    """
    if not isinstance(values, dict):
        raise TypeError(f"{kind.__name__} must be an object; got {type(values).__name__}")
    record = kind(**values)
    for part in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, part.name)
        if type(value) is not part.type or (part.type is int and value < 0):
            need = "a text" if part.type is str else "an integer >= 0"
            raise InputError(f"{part.name} must be {need}; got {value!r:.80}")
    return record


def check_plain_name(name: str, *, where: str) -> None:
    """Raise ValueError unless ``name`` is a plain file name inside one folder."""
    if not _PLAIN_NAME.match(name):
        raise InputError(
            f"file names in {where} must be letters, digits, '.', '_' or '-'; got {name!r}"
        )


def plain_name(domain: str) -> str:
    """Prefix of the names of a domain's files: the domain's own name where that is plain.

    Else its plain characters and a digest, so that two domains never share a prefix.
    """
    if _PLAIN_NAME.match(domain):
        return domain
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", domain).strip("._-")[:40] or "domain"
    return f"{plain}-{hashlib.sha256(os.fsencode(domain)).hexdigest()[:8]}"


def check_same_tokenizer(manifests: Sequence[Manifest]) -> TokenizerIdentity:
    """Return the tokenizer that all folders share. Raises ValueError when they differ."""
    first = manifests[0].tokenizer
    for manifest in manifests[1:]:
        if not manifest.tokenizer.is_same(first):
            raise InputError(
                f"token folders must share one tokenizer; got {first.name!r} ({first.vocab_size}) "
                f"and {manifest.tokenizer.name!r} ({manifest.tokenizer.vocab_size})"
            )
    return first
