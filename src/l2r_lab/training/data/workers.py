"""Worker processes that tokenize shards; they end when the process that started them ends."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from l2r.hf.checkpoints import tokenizer_errors
from l2r.text import (
    BadShardError,
    BinaryFile,
    Split,
    TokenFile,
    TokenizerIdentity,
    TokenWriter,
    UnreachableError,
    load_tokenizer,
    open_shard,
    read_texts,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DOCUMENTS_PER_BATCH = 64
_CHARACTERS_PER_BATCH = 1 << 24  # and no more text than that, but for the last document
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class ShardTask:
    """One shard to tokenize: where it is (path or URL), and the name of its token files."""

    name: str
    domain: str
    file: str
    url: str


# The token file of every part, or why the shard gave none.
ShardResult = dict[str, TokenFile] | BadShardError | UnreachableError


def tokenize_shards(
    tasks: Sequence[ShardTask],
    out: Path,
    *,
    tokenizer: Path | None,
    split: Split,
    workers: int,
    on_progress: Callable[[str, int, int], None],
) -> Generator[tuple[ShardTask, ShardResult], None, None]:
    """Yield each task as it finishes: its token file per part, or what is wrong with its shard.

    After a shard that cannot be reached no other is begun; those under way are finished.
    ``on_progress(name, bytes_read, tokens)`` is called for running shards. Memory: one batch of
    documents per worker. Closing the generator stops the workers at their next batch.
    """
    if not tasks:
        return
    # spawn: forking a process that runs tokenizer or torch threads can deadlock.
    context = multiprocessing.get_context("spawn")
    # A bare number: a worker that is killed while it holds the lock of an Event keeps it for good.
    reports, stop = context.SimpleQueue(), context.RawValue("b", 0)
    with ProcessPoolExecutor(
        min(workers, len(tasks)), context, _start_worker, (tokenizer, out, split, reports, stop)
    ) as pool:
        running = {pool.submit(_tokenize, task): task for task in tasks}
        try:
            while running:
                finished, _ = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                while not reports.empty():
                    on_progress(*reports.get())
                for future in finished:
                    task, result = running.pop(future), future.result()
                    if isinstance(result, UnreachableError):
                        running = {f: other for f, other in running.items() if not f.cancel()}
                    yield task, result
        finally:
            stop.value = 1
            pool.shutdown(wait=False, cancel_futures=True)


class _Worker(NamedTuple):
    """State that a worker process keeps between shards."""

    tokenizer: "Tokenizer"
    identity: TokenizerIdentity
    out: Path
    split: Split
    reports: Any
    stop: Any

    def encode(self, task: ShardTask, stream: BinaryFile) -> Iterator[tuple[str, list[int]]]:
        """Part and token ids of a shard's documents, tokenized in batches."""
        texts = read_texts(stream, task.file)
        tokens, reported = 0, time.monotonic()
        while batch := _next_batch(texts):
            if self.stop.value:
                raise InterruptedError(f"stopped while reading {task.file}")
            parts = [(part, text) for text in batch if (part := self.split.part(text)) is not None]
            kept = [text for _, text in parts]
            with tokenizer_errors():
                encodings = self.tokenizer.encode_batch_fast(kept, add_special_tokens=False)
            for (part, _), encoding in zip(parts, encodings, strict=True):
                tokens += len(encoding.ids) + 1
                yield part, encoding.ids
            if time.monotonic() - reported > _POLL_SECONDS:
                self.reports.put((task.name, stream.tell(), tokens))
                reported = time.monotonic()


def _next_batch(texts: Iterator[str]) -> list[str]:
    batch, characters = list[str](), 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == _DOCUMENTS_PER_BATCH or characters >= _CHARACTERS_PER_BATCH:
            break
    return batch


_worker: _Worker


def _start_worker(tokenizer: Path | None, *state: Any) -> None:
    global _worker  # noqa: PLW0603 - a pool hands its workers state in no other way
    # Ctrl-C reaches every process; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The processes are the parallelism; the tokenizer's own threads would only fight them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker = _Worker(*load_tokenizer(tokenizer), *state)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenize(task: ShardTask) -> ShardResult:
    writers = {
        part: TokenWriter(folder, task.name, domain=task.domain, tokenizer=_worker.identity)
        for part, folder in _worker.split.folders(_worker.out).items()
    }
    try:
        with open_shard(task.url) as stream:
            for part, ids in _worker.encode(task, stream):
                writers[part].append(ids)
        return {part: writer.close() for part, writer in writers.items()}
    except BaseException as error:
        for writer in writers.values():
            writer.abort()
        if isinstance(error, BadShardError | UnreachableError):
            return error
        raise
