"""Token files: written once (token_writer.py), checksummed, memory-mapped for training.

Packing is OLMoE's: documents are joined with an end-of-text token after each, the file is cut
into instances of ``sequence_length`` tokens, and what is left at the end of a file is dropped.
Labels are not stored: a causal model shifts ``input_ids`` itself.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt
from torch import Tensor

from l2r.errors import InputError
from l2r.files.reading import file_sha256
from l2r.text.manifest import (
    ENDS,
    TokenFile,
    TokenizerIdentity,
    check_same_tokenizer,
    read_manifest,
)
from l2r.text.shuffling import batch_indices


def read_documents(folder: Path) -> Iterator[tuple[str, Int[np.ndarray, " n"]]]:
    """Documents of a token folder one by one: (domain, ids with the end-of-text token)."""
    manifest = read_manifest(folder)
    for file in manifest.files:
        tokens = _open_tokens(Path(folder), file, manifest.tokenizer)
        start = 0
        for end in np.fromfile(Path(folder) / f"{file.name}.ends", dtype=ENDS):
            yield file.domain, tokens[start : int(end)].astype(np.int64)
            start = int(end)


class TokenDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Instances of ``sequence_length`` tokens from one or several token folders, memory-mapped.

    source: a folder with ``manifest.json``, or several.
    domains: names; ``domain`` of an item is a position in this tuple.

    Raises ValueError for a missing or broken manifest, a truncated file, a checksum that does
    not match (``verify=True`` reads every byte once), folders made with different tokenizers, or
    files that hold no whole instance.
    """

    def __init__(
        self,
        source: Path | str | Sequence[Path | str],
        sequence_length: int,
        *,
        verify: bool = False,
    ) -> None:
        if sequence_length < 2:
            raise InputError(f"sequence_length must be >= 2; got {sequence_length}")
        folders = [source] if isinstance(source, str | Path) else list(source)
        if not folders:
            raise InputError("source must be a token folder or a list of them; got an empty list")
        manifests = [read_manifest(Path(folder)) for folder in folders]
        self.sequence_length = sequence_length
        self.tokenizer = check_same_tokenizer(manifests)
        self._files = [
            (Path(folder), file)
            for folder, manifest in zip(folders, manifests, strict=True)
            for file in manifest.files
        ]
        self.domains = tuple(sorted({file.domain for _, file in self._files}))
        for folder, file in self._files:
            check_file(folder, file, self.tokenizer, verify=verify)
        counts = [file.tokens // sequence_length for _, file in self._files]
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._maps: dict[int, UInt[np.ndarray, " n"]] = {}
        if len(self) == 0:
            raise InputError(
                f"no token file of {folders[0]} holds one instance of {sequence_length} tokens; "
                f"lower sequence_length"
            )

    @property
    def sha256(self) -> str:
        """Checksum of the tokens, their documents, domains and tokenizer, wherever they lie.

        Made of the checksums in the manifests; no token is read.
        """
        tokenizer = self.tokenizer.sha256 or self.tokenizer.name
        files = [
            (file.domain, file.tokens, file.documents, file.sha256, file.ends_sha256)
            for _, file in self._files
        ]
        return hashlib.sha256(json.dumps([tokenizer, files]).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids`` [sequence_length] and ``domain`` [], both int64."""
        return {name: value[0] for name, value in self.rows([index]).items()}

    def rows(
        self, indices: Sequence[int] | Int[np.ndarray, " B"]
    ) -> dict[str, Int[Tensor, "B *S"]]:
        """Read a batch: ``input_ids`` [B, sequence_length] and ``domain`` [B], both int64.

        Raises IndexError for an index outside ``[0, len(self))``.
        """
        length = self.sequence_length
        ids = np.empty((len(indices), length), dtype=np.int64)
        domain = np.empty(len(indices), dtype=np.int64)
        for row, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"index must be in [0, {len(self)}); got {index}")
            position = int(np.searchsorted(self._starts, index, side="right")) - 1
            start = (int(index) - int(self._starts[position])) * length
            ids[row] = self._tokens(position)[start : start + length]
            if ids[row].max() >= self.tokenizer.vocab_size:
                folder, file = self._files[position]
                raise InputError(
                    f"token ids of {folder / file.name}.bin must be below "
                    f"{self.tokenizer.vocab_size}; got {ids[row].max()}; write it again"
                )
            domain[row] = self.domains.index(self._files[position][1].domain)
        return {"input_ids": torch.from_numpy(ids), "domain": torch.from_numpy(domain)}

    def files_of(self, indices: Int[np.ndarray, " B"]) -> tuple[int, int]:
        """Count the files that rows lie in, and all files."""
        return len({*np.searchsorted(self._starts, indices, side="right")}), len(self._files)

    def domain_rows(self, domain: str) -> list[range]:
        """Rows of a domain, a range for each of its files."""
        return [
            range(int(self._starts[position]), int(self._starts[position + 1]))
            for position, (_, file) in enumerate(self._files)
            if file.domain == domain
        ]

    def batch(
        self, step: int, batch_size: int, seed: int, *, rank: int = 0, world_size: int = 1
    ) -> Int[np.ndarray, " rows"]:
        """Return the indices of one rank's slice of the batch at ``step``; no state is kept.

        See :mod:`l2r.text.shuffling`.
        """
        return batch_indices(
            len(self), step, batch_size, seed=seed, rank=rank, world_size=world_size
        )

    def _tokens(self, position: int) -> UInt[np.ndarray, " n"]:
        if position not in self._maps:
            self._maps[position] = _open_tokens(*self._files[position], self.tokenizer)
        return self._maps[position]

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memory map becomes a copy of the whole file; workers map it again instead.
        return {**self.__dict__, "_maps": {}}


def check_file(
    folder: Path, file: TokenFile, tokenizer: TokenizerIdentity, *, verify: bool = True
) -> None:
    """Raise ValueError when a token file is missing, truncated or, with ``verify``, changed."""
    expected = {
        f"{file.name}.bin": (file.tokens * tokenizer.dtype.itemsize, file.sha256),
        f"{file.name}.ends": (file.documents * ENDS.itemsize, file.ends_sha256),
    }
    for name, (size, sha256) in expected.items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path} is missing; the manifest lists it")
        if path.stat().st_size != size:
            raise InputError(f"{path} must have {size} bytes; got {path.stat().st_size}")
        if verify and file_sha256(path) != sha256:
            raise InputError(f"{path} does not match the checksum in the manifest; write it again")


def _open_tokens(
    folder: Path, file: TokenFile, tokenizer: TokenizerIdentity
) -> UInt[np.ndarray, " n"]:
    if file.tokens == 0:
        return np.empty(0, dtype=tokenizer.dtype)
    return np.memmap(folder / f"{file.name}.bin", dtype=tokenizer.dtype, mode="r")
