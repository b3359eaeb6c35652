"""Shards to token files, in parallel, resumable after a kill.

One shard is one task: a worker process streams it, tokenizes small batches and writes one token
file per part (training, held out), which gets its name only when it is whole. A receipt in
``receipts/`` then records it, and a later run skips the shard. Nothing else is kept, so the bytes
depend neither on kills nor on the number of workers.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from l2r.errors import InputError
from l2r.files.atomic import make_folder, remove_unfinished, try_lock
from l2r.text import (
    EVERYTHING,
    TOKENIZER,
    BadShardError,
    Manifest,
    Split,
    TokenizerIdentity,
    UnreachableError,
    load_tokenizer,
    plain_name,
    save_tokenizer,
    shard_bytes,
    write_manifest,
)
from l2r_lab.training.data.olmoe_mix import ShardPlan, name_shards
from l2r_lab.training.data.receipts import RECEIPTS, Parts, Receipts
from l2r_lab.training.data.workers import ShardTask, tokenize_shards

OnBadShard = Literal["refuse", "skip"]


@dataclass(frozen=True)
class PrepareProgress:
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
        if any(shard.file is None for domain in plan.domains for shard in domain.shards):
            plan = name_shards(plan, listing)
        # A local copy may leave the leading data/ out.
        there = {path.removeprefix("data/"): path for paths in listing.values() for path in paths}
        chosen = []
        for domain, shard in ((d.name, s) for d in plan.domains for s in d.shards):
            file = there.get(str(shard.file).removeprefix("data/"))
            if file is None:
                raise InputError(f"the source lacks {shard.file}, which the plan names")
            chosen.append((domain, shard.index, file))
    return [
        ShardTask(f"{plain_name(domain)}-{index:05d}", domain, file, prefix + file)
        for domain, index, file in chosen
    ]


def prepare_tokens(
    tasks: Sequence[ShardTask],
    out: Path,
    *,
    tokenizer: Path | None = None,
    split: Split = EVERYTHING,
    workers: int = 1,
    on_bad_shard: OnBadShard = "refuse",
    source: Mapping[str, Any] | None = None,
    on_progress: Callable[[PrepareProgress], None] = lambda _: None,
) -> dict[str, Manifest]:
    """Tokenize shards, write a manifest per part and the tokenizer; call again after a kill.

    ``out`` gets ``train/``, ``validation/`` and ``tokenizer/``; without a hold-out the training
    tokens lie in ``out`` itself. Returns the manifest of every part.

    tokenizer: see :func:`l2r.text.tokenizer.load_tokenizer`; None is OLMoE's.
    on_bad_shard: ``refuse`` stops at the first shard that is truncated or corrupt, ``skip``
        leaves it out and names it in the manifests.
    source: written into the manifests, with the split and the skipped shards.

    Raises ValueError for bad options, for a folder that holds tokens of another tokenizer or of
    another split, for a folder that another process is writing, for a part that got no document,
    BadShardError (a ValueError) for a bad shard, and UnreachableError (a ValueError) where a
    source stops answering, whatever ``on_bad_shard`` is: finished shards are kept.
    """
    if workers < 1:
        raise InputError(f"workers must be >= 1; got {workers}")
    if on_bad_shard not in get_args(OnBadShard):
        raise InputError(f"on_bad_shard must be refuse or skip; got {on_bad_shard!r}")
    make_folder(out)
    with try_lock(out / ".lock") as mine:
        if not mine:
            raise InputError(f"out {out} is being written by another process; wait for its end")
        return _prepare(
            tasks, out, tokenizer, split, workers, on_bad_shard, source or {}, on_progress
        )


def _prepare(
    tasks: Sequence[ShardTask],
    out: Path,
    tokenizer: Path | None,
    split: Split,
    workers: int,
    on_bad_shard: OnBadShard,
    source: Mapping[str, Any],
    on_progress: Callable[[PrepareProgress], None],
) -> dict[str, Manifest]:
    """``prepare_tokens`` in a folder that is this process's alone."""
    _, identity = load_tokenizer(tokenizer)
    folders = split.folders(out)
    for folder in folders.values():
        make_folder(out, *folder.relative_to(out).parts, RECEIPTS)
        remove_unfinished(folder)
        remove_unfinished(folder / RECEIPTS)
    make_folder(out, TOKENIZER)
    receipts = Receipts(folders, identity, split)
    sizes = {task.name: shard_bytes(task.url) for task in tasks}
    done = receipts.read(tasks, sizes)
    save_tokenizer(out / TOKENIZER, tokenizer)
    counter = _Counter(sizes, done, on_progress)
    skipped: dict[str, str] = {}
    unreachable: list[UnreachableError] = []
    left = [task for task in tasks if task.name not in done]
    results = tokenize_shards(
        left, out, tokenizer=tokenizer, split=split, workers=workers, on_progress=counter.running
    )
    with contextlib.closing(results):  # stops the workers when a shard is refused
        for task, result in results:
            if isinstance(result, UnreachableError):
                unreachable.append(result)
            elif isinstance(result, BadShardError):
                if on_bad_shard == "refuse":
                    raise result
                skipped[task.file] = str(result)
                counter.finished(task.name, 0)
            else:
                receipts.write(task, result, sizes[task.name])
                done[task.name] = result
                counter.finished(task.name, _tokens(result))
    if unreachable:  # never left out: the same command reads what is missing
        others = f" ({len(unreachable)} shards in all)" if len(unreachable) > 1 else ""
        raise UnreachableError(f"{unreachable[0]}{others}")
    if not done:
        raise InputError("no shard could be read; every one of them was skipped")
    ordered = {task.file: skipped[task.file] for task in tasks if task.file in skipped}
    finished = [done[task.name] for task in tasks if task.name in done]
    return _write_manifests(folders, finished, identity, split, source, ordered)


def _write_manifests(
    folders: Mapping[str, Path],
    finished: Sequence[Parts],
    identity: TokenizerIdentity,
    split: Split,
    source: Mapping[str, Any],
    skipped: Mapping[str, str],
) -> dict[str, Manifest]:
    manifests = {}
    for part in folders:
        described = {} if split == EVERYTHING else {"split": {"part": part, **asdict(split)}}
        origin = {**source, **described, "skipped": skipped}
        manifests[part] = Manifest(identity, tuple(parts[part] for parts in finished), origin)
        if manifests[part].tokens == 0:
            raise InputError(
                f"no document went to {part}; raise share={split.share} or "
                f"hold_out={split.hold_out}"
            )
    for part, manifest in manifests.items():
        write_manifest(folders[part], manifest)
    return manifests


class _Counter:
    """Adds up what finished shards hold and what running ones report."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        done: Mapping[str, Parts],
        report: Callable[[PrepareProgress], None],
    ) -> None:
        self._sizes = sizes
        # Per shard: bytes read, tokens written.
        self._seen = {name: (self._sizes[name], _tokens(parts)) for name, parts in done.items()}
        self._closed = len(done)
        self._report = report
        self._publish()

    def running(self, name: str, bytes_read: int, tokens: int) -> None:
        self._seen[name] = (min(bytes_read, self._sizes[name]), tokens)
        self._publish()

    def finished(self, name: str, tokens: int) -> None:
        self._closed += 1
        self.running(name, self._sizes[name], tokens)

    def _publish(self) -> None:
        self._report(
            PrepareProgress(
                bytes_read=sum(size for size, _ in self._seen.values()),
                bytes_total=sum(self._sizes.values()),
                tokens=sum(tokens for _, tokens in self._seen.values()),
                shards=self._closed,
                shards_total=len(self._sizes),
            )
        )


def _tokens(parts: Parts) -> int:
    return sum(file.tokens for file in parts.values())
