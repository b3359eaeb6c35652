"""Writing of token files; tokens.py reads them."""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from l2r.errors import InputError, PathError, using
from l2r.files.atomic import new_file, publish
from l2r.text.manifest import (
    ENDS,
    Manifest,
    TokenFile,
    TokenizerIdentity,
    check_plain_name,
    plain_name,
    write_manifest,
)


class TokenWriter:
    """Appends documents to one token file; the file gets its name only at ``close``."""

    def __init__(
        self, folder: Path, name: str, *, domain: str, tokenizer: TokenizerIdentity
    ) -> None:
        check_plain_name(name, where=str(folder))
        self.folder, self.name, self.domain = Path(folder), name, domain
        self.tokenizer = tokenizer
        self.tokens = 0
        self.documents = 0
        with using(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._bin = _HashedFile(self.folder / f"{name}.bin")
        self._ends = _HashedFile(self.folder / f"{name}.ends")

    def append(self, ids: Sequence[int] | Int[np.ndarray, " n"]) -> None:
        """Add one document and the end-of-text token after it; empty documents are left out.

        Raises ValueError for a token id outside the vocabulary.
        """
        array = np.asarray(ids, dtype=np.int64)
        if array.size == 0:
            return
        if array.min() < 0 or array.max() >= self.tokenizer.vocab_size:
            raise InputError(
                f"token ids must be in [0, {self.tokenizer.vocab_size}); got "
                f"[{array.min()}, {array.max()}] in document {self.documents} of {self.name}"
            )
        if array[-1] != self.tokenizer.eos_token_id:
            array = np.append(array, self.tokenizer.eos_token_id)
        self._bin.write(array.astype(self.tokenizer.dtype).tobytes())
        self.tokens += array.size
        self.documents += 1
        self._ends.write(np.array([self.tokens], dtype=ENDS).tobytes())

    def close(self) -> TokenFile:
        """Store the file under its real name and return its manifest entry."""
        ends_sha256, sha256 = self._ends.publish(), self._bin.publish()
        return TokenFile(self.name, self.domain, self.tokens, self.documents, sha256, ends_sha256)

    def abort(self) -> None:
        """Remove what was written."""
        self._bin.remove()
        self._ends.remove()


def write_token_files(
    folder: Path,
    documents: Mapping[str, Iterable[Sequence[int]]],
    *,
    tokenizer: TokenizerIdentity,
    source: Mapping[str, Any] | None = None,
) -> Manifest:
    """Write one token file per domain, then the manifest.

    ``documents`` maps a domain to its documents, each a list of token ids; nothing is left of a
    file of which one fails. A domain may have any name.
    """
    files = []
    for domain, texts in documents.items():
        writer = TokenWriter(
            folder, f"{plain_name(domain)}-00000", domain=domain, tokenizer=tokenizer
        )
        try:
            for ids in texts:
                writer.append(ids)
        except BaseException:
            writer.abort()
            raise
        files.append(writer.close())
    manifest = Manifest(tokenizer, tuple(files), source or {})
    write_manifest(Path(folder), manifest)
    return manifest


class _HashedFile:
    """File under a temporary name that computes the SHA-256 of what is written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary, self._stream = new_file(path)
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        with self._named():
            self._stream.write(data)
        self._hash.update(data)

    def publish(self) -> str:
        with self._named():
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        publish(self._temporary, self._path)
        return self._hash.hexdigest()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Name the file in errors of the system, such as that of a full disk."""
        try:
            yield
        except OSError as error:
            raise PathError(error.errno, error.strerror, str(self._path)) from error

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # a full disk has no room for what its buffer holds
            self._stream.close()
        self._temporary.unlink(missing_ok=True)
