"""Shards to token files, in parallel, resumable after a kill.

One shard is one task: a worker process streams it, tokenizes small batches and writes one token
file, which gets its name only when it is whole. A receipt in ``receipts/`` then records it, and a
later run skips it. Nothing else is kept, so the bytes depend neither on kills nor on the number
of workers.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from l2r.data.atomic import write_json
from l2r.data.manifest import Manifest, TokenFile, TokenizerIdentity, write_manifest
from l2r.data.mixture import PlannedShard, ShardPlan
from l2r.data.shards import BadShardError, shard_bytes
from l2r.data.tokenizer import load_tokenizer
from l2r.data.tokens import check_file
from l2r.data.workers import ShardTask, tokenize_shards

RECEIPTS = "receipts"
OnBadShard = Literal["refuse", "skip"]


@dataclass(frozen=True)
class Progress:
    """Totals so far, earlier runs included: compressed bytes read, tokens, shards."""

    bytes_read: int
    bytes_total: int
    tokens: int
    shards: int
    shards_total: int


def shard_tasks(
    listing: Mapping[str, Sequence[str]], prefix: str, *, plan: ShardPlan | None = None
) -> list[ShardTask]:
    """Tasks for the shards of a listing: those of the plan, or all of them.

    prefix: what turns a listed path into a path or URL, e.g. a folder and a slash.

    A plan with file names takes those files; one without takes positions in the sorted listing,
    which must then be complete. Raises ValueError when the listing lacks a planned shard.
    """
    if plan is None:
        chosen = [
            (domain, index, file)
            for domain, files in listing.items()
            for index, file in enumerate(files)
        ]
    else:
        chosen = [
            (
                domain.name,
                shard.index,
                _planned_file(listing, domain.name, domain.total_shards, shard),
            )
            for domain in plan.domains
            for shard in domain.shards
        ]
    return [
        ShardTask(f"{domain}-{index:05d}", domain, file, prefix + file)
        for domain, index, file in chosen
    ]


def prepare(
    tasks: Sequence[ShardTask],
    out: Path,
    *,
    tokenizer: Path | None = None,
    workers: int = 1,
    on_bad_shard: OnBadShard = "refuse",
    source: Mapping[str, Any] | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Tokenize shards into ``out`` and write its manifest; call again to go on after a kill.

    tokenizer: see :func:`l2r.data.tokenizer.load_tokenizer`; None is OLMoE's.
    on_bad_shard: ``refuse`` stops at the first shard that is truncated or corrupt, ``skip``
        leaves it out and names it in the manifest.
    source: written into the manifest, with the skipped shards.

    Raises ValueError for bad options, for a folder that holds tokens of another tokenizer, and
    BadShardError (a ValueError) for a bad shard.
    """
    if workers < 1:
        raise ValueError(f"workers must be >= 1; got {workers}")
    if on_bad_shard not in get_args(OnBadShard):
        raise ValueError(f"on_bad_shard must be refuse or skip; got {on_bad_shard!r}")
    _, identity = load_tokenizer(tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob(".*.part"):
        stale.unlink(missing_ok=True)
    done = _read_receipts(out, tasks, identity)
    counter = _Counter(tasks, done, on_progress)
    skipped: dict[str, str] = {}
    left = [task for task in tasks if task.name not in done]
    results = tokenize_shards(
        left, out, tokenizer=tokenizer, workers=workers, on_progress=counter.running
    )
    with contextlib.closing(results):  # stops the workers when a shard is refused
        for task, result in results:
            if isinstance(result, BadShardError):
                if on_bad_shard == "refuse":
                    raise result
                skipped[task.file] = str(result)
            else:
                _write_receipt(out, task, result, identity)
                done[task.name] = result
            counter.finished(task, result)
    if not done:
        raise ValueError("no shard could be read; every one of them was skipped")
    files = tuple(done[task.name] for task in tasks if task.name in done)
    ordered = {task.file: skipped[task.file] for task in tasks if task.file in skipped}
    manifest = Manifest(identity, files, {**(source or {}), "skipped": ordered})
    write_manifest(out, manifest)
    return manifest


class _Counter:
    """Adds up what finished shards hold and what running ones report."""

    def __init__(
        self,
        tasks: Sequence[ShardTask],
        done: Mapping[str, TokenFile],
        report: Callable[[Progress], None],
    ) -> None:
        self._sizes = {task.name: shard_bytes(task.url) for task in tasks}
        # Per shard: bytes read, tokens written.
        self._seen = {name: (self._sizes[name], file.tokens) for name, file in done.items()}
        self._closed = len(done)
        self._report = report
        self._publish()

    def running(self, name: str, bytes_read: int, tokens: int) -> None:
        self._seen[name] = (min(bytes_read, self._sizes[name]), tokens)
        self._publish()

    def finished(self, task: ShardTask, result: TokenFile | BadShardError) -> None:
        tokens = result.tokens if isinstance(result, TokenFile) else 0
        self._seen[task.name] = (self._sizes[task.name], tokens)
        self._closed += 1
        self._publish()

    def _publish(self) -> None:
        self._report(
            Progress(
                bytes_read=sum(size for size, _ in self._seen.values()),
                bytes_total=sum(self._sizes.values()),
                tokens=sum(tokens for _, tokens in self._seen.values()),
                shards=self._closed,
                shards_total=len(self._sizes),
            )
        )


def _planned_file(
    listing: Mapping[str, Sequence[str]], domain: str, total: int, shard: PlannedShard
) -> str:
    files = list(listing.get(domain, ()))
    if shard.file is None:
        if len(files) != total:
            raise ValueError(
                f"the plan counts shards of {domain} in a listing of {total}; the source has "
                f"{len(files)}; make the plan with --listing, so that it names files"
            )
        return files[shard.index]
    # A local copy may leave the leading data/ out.
    for file in files:
        if file.removeprefix("data/") == shard.file.removeprefix("data/"):
            return file
    raise ValueError(f"the source lacks {shard.file}, which the plan names")


def _read_receipts(
    out: Path, tasks: Sequence[ShardTask], identity: TokenizerIdentity
) -> dict[str, TokenFile]:
    """Token files that earlier runs finished. Raises ValueError when they do not fit this run."""
    done = {}
    for task in tasks:
        path = out / RECEIPTS / f"{task.name}.json"
        if not path.is_file():
            continue
        values = json.loads(path.read_text(encoding="utf-8"))
        if TokenizerIdentity(**values["tokenizer"]) != identity or values["shard"] != task.file:
            raise ValueError(
                f"{out} holds tokens of {values['shard']} by tokenizer "
                f"{values['tokenizer']['name']!r}; write {task.file} by {identity.name!r} to "
                f"another folder"
            )
        entry = TokenFile(**values["entry"])
        check_file(out, entry, identity, verify=False)
        done[task.name] = entry
    return done


def _write_receipt(
    out: Path, task: ShardTask, entry: TokenFile, identity: TokenizerIdentity
) -> None:
    write_json(
        out / RECEIPTS / f"{task.name}.json",
        {"shard": task.file, "tokenizer": asdict(identity), "entry": asdict(entry)},
    )
