"""Receipts: what earlier runs of a preparation finished, a small file per shard and part."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from l2r.errors import InputError
from l2r.files.atomic import write_json
from l2r.files.reading import parse_json, read_bytes
from l2r.text import EVERYTHING, Split, TokenFile, TokenizerIdentity, check_file, typed
from l2r_lab.training.data.workers import ShardTask

RECEIPTS = "receipts"
Parts = dict[str, TokenFile]  # the token file of every part of one shard


@dataclass(frozen=True)
class Receipts:
    """Record of finished work: a small file per shard and part, next to the tokens."""

    folders: Mapping[str, Path]
    identity: TokenizerIdentity
    split: Split

    def read(self, tasks: Sequence[ShardTask], sizes: Mapping[str, int]) -> dict[str, Parts]:
        """Shards of which every part is there, by name; ``sizes`` are their sources' bytes.

        Raises ValueError when one does not fit this run.
        """
        finished = {}
        for task in tasks:
            size = sizes[task.name]
            parts = {part: self._read(folder, task, size) for part, folder in self.folders.items()}
            whole = {part: file for part, file in parts.items() if file is not None}
            if len(whole) == len(parts):
                finished[task.name] = whole
        return finished

    def write(self, task: ShardTask, parts: Parts, size: int) -> None:
        """Record a finished shard of ``size`` bytes."""
        for part, entry in parts.items():
            values = {"shard": task.file, "tokenizer": asdict(self.identity), "bytes": size}
            if self.split != EVERYTHING:
                values["split"] = asdict(self.split)
            path = _receipt(self.folders[part], task)
            write_json(path, {**values, "entry": asdict(entry)})

    def _read(self, folder: Path, task: ShardTask, size: int) -> TokenFile | None:
        path = _receipt(folder, task)
        if not path.is_file():
            return None
        try:
            values = parse_json(read_bytes(path))
            tokenizer = typed(TokenizerIdentity, values["tokenizer"])
            split = Split(**values.get("split", {}))
            shard, entry = str(values["shard"]), typed(TokenFile, values["entry"])
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is no receipt of a shard: {error}; remove it") from error
        if tokenizer != self.identity or shard != task.file:
            raise InputError(
                f"{folder} holds tokens of {shard} by tokenizer {tokenizer.name!r}; "
                f"write {task.file} by {self.identity.name!r} to another folder"
            )
        if values.get("bytes") not in (None, size):  # 0.2.0 wrote none
            raise InputError(
                f"{task.file} has changed since its tokens were written to {folder}; write them "
                f"to another folder"
            )
        if split != self.split:
            raise InputError(
                f"{folder} was begun with hold_out={split.hold_out}, share={split.share}; got "
                f"hold_out={self.split.hold_out}, share={self.split.share}; give the same or "
                f"write to another folder"
            )
        check_file(folder, entry, tokenizer, verify=False)
        return entry


def _receipt(folder: Path, task: ShardTask) -> Path:
    return folder / RECEIPTS / f"{task.name}.json"
