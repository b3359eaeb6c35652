"""Worker processes that tokenize shards; they end when the process that started them ends."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from l2r.data.manifest import TokenFile, TokenizerIdentity
from l2r.data.shards import BadShardError, BinaryFile, open_shard, read_texts
from l2r.data.tokenizer import load_tokenizer
from l2r.data.tokens import write_token_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DOCUMENTS_PER_BATCH = 64
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class ShardTask:
    """One shard to tokenize: where it is (path or URL), and the token file it becomes."""

    name: str
    domain: str
    file: str
    url: str


def tokenize_shards(
    tasks: Sequence[ShardTask],
    out: Path,
    *,
    tokenizer: Path | None,
    workers: int,
    on_progress: Callable[[str, int, int], None],
) -> Generator[tuple[ShardTask, TokenFile | BadShardError], None, None]:
    """Yield each task with its token file, or with what is wrong with its shard, as they finish.

    ``on_progress(name, bytes_read, tokens)`` hears about running shards. Memory: one batch of
    documents per worker. Closing the generator stops the workers at their next batch.
    """
    if not tasks:
        return
    # spawn: forking a process that runs tokenizer or torch threads can deadlock.
    context = multiprocessing.get_context("spawn")
    reports, stop = context.SimpleQueue(), context.Event()
    with ProcessPoolExecutor(
        min(workers, len(tasks)), context, _start_worker, (out, tokenizer, reports, stop)
    ) as pool:
        running = {pool.submit(_tokenize, task): task for task in tasks}
        try:
            while running:
                finished, _ = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                while not reports.empty():
                    on_progress(*reports.get())
                for future in finished:
                    yield running.pop(future), future.result()
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """What one worker process keeps between shards."""

    def __init__(self, out: Path, tokenizer: Path | None, reports: Any, stop: Any) -> None:
        self.out, self.reports, self.stop = out, reports, stop
        loaded: tuple[Tokenizer, TokenizerIdentity] = load_tokenizer(tokenizer)
        self.tokenizer, self.identity = loaded

    def encode(self, task: ShardTask, stream: BinaryFile) -> Iterator[list[int]]:
        """Token ids of a shard's documents, tokenized in batches."""
        texts = read_texts(stream, task.file)
        tokens, reported = 0, time.monotonic()
        while batch := list(islice(texts, _DOCUMENTS_PER_BATCH)):
            if self.stop.is_set():
                raise InterruptedError(f"stopped while reading {task.file}")
            for encoding in self.tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                tokens += len(encoding.ids) + 1
                yield encoding.ids
            if time.monotonic() - reported > _POLL_SECONDS:
                self.reports.put((task.name, stream.tell(), tokens))
                reported = time.monotonic()


_worker: _Worker


def _start_worker(out: Path, tokenizer: Path | None, reports: Any, stop: Any) -> None:
    global _worker  # noqa: PLW0603 - a pool hands its workers state in no other way
    # Ctrl-C reaches every process; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The processes are the parallelism; the tokenizer's own threads would only fight them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker = _Worker(out, tokenizer, reports, stop)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenize(task: ShardTask) -> TokenFile | BadShardError:
    try:
        with open_shard(task.url) as stream:
            return write_token_file(
                _worker.out,
                task.name,
                _worker.encode(task, stream),
                domain=task.domain,
                tokenizer=_worker.identity,
            )
    except BadShardError as error:
        return error
