"""Shards from a server that resets connections: none is taken for corrupt, lost or read again."""

import gzip
import json
import signal
import socketserver
import struct
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager
from socket import SO_LINGER, SOL_SOCKET
from typing import ClassVar

import pytest

from l2r.errors import InputError
from l2r.text import streams
from l2r.text.shards import BadShardError, read_texts, shard_bytes
from l2r.text.streams import UnreachableError
from l2r_lab.training.data import workers
from l2r_lab.training.data.prepare import prepare_tokens
from l2r_lab.training.data.workers import ShardTask
from tests.processes import Running

DOMAINS = ("dclm", "pes2o", "wiki")


def shard(domain):
    rows = [{"text": f"{domain} document {n} says {n * n}. " * 9} for n in range(200)]
    return gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), 1)


FILES = {f"/{domain}.json.gz": shard(domain) for domain in DOMAINS}


class _Server(socketserver.StreamRequestHandler):
    """HTTP with ranges; ``resets`` says how many bodies of a path it still cuts, ``refuses`` how
    many connections of a kind (GET, HEAD) and path it resets before it answers. ``halfway`` is
    called once, by path, when a body that it cuts has half come."""

    resets, refuses, asked = Counter(), Counter(), Counter()
    halfway: ClassVar = {}

    def handle(self):
        head = b""
        while line := self.rfile.readline().strip():
            head += line + b"\n"
        kind, path, _ = head.decode().split(" ", 2)
        _Server.asked[kind, path] += 1
        if _Server.refuses[kind, path]:
            _Server.refuses[kind, path] -= 1
            return self.reset()
        data = FILES[path]
        start, end = 0, len(data)
        for line in head.splitlines():
            if line.lower().startswith(b"range: bytes="):
                first, _, last = line.partition(b"=")[2].partition(b"-")
                start, end = int(first), min(end, int(last or end) + 1)
        body = data[start:end]
        self.wfile.write(
            f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {start}-{end - 1}/{len(data)}"
            f"\r\nAccept-Ranges: bytes\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            "".encode()
        )
        if kind == "HEAD":
            return None
        if _Server.resets[path]:
            _Server.resets[path] -= 1
            self.wfile.write(body[: len(body) // 2])
            _Server.halfway.pop(path, lambda: None)()
            return self.reset()
        self.wfile.write(body)
        return None

    def reset(self):
        self.wfile.flush()
        self.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))


@contextmanager
def serving():
    _Server.resets, _Server.refuses, _Server.asked = Counter(), Counter(), Counter()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.fixture
def server():
    pytest.importorskip("aiohttp", reason="fsspec reads http with it")
    import fsspec

    with serving() as address:
        yield address
    fsspec.filesystem("http").clear_instance_cache()


class _Here:
    """An executor that runs a shard when it is asked to, in this process."""

    def __init__(self, count, context, start, state):
        tokenizer, *rest = state
        workers._worker = workers._Worker(*workers.load_tokenizer(tokenizer), *rest)

    def submit(self, function, task):
        future = Future()
        try:
            future.set_result(function(task))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def here(monkeypatch):
    """Shards are read in this process, without seconds between tries."""
    monkeypatch.setattr(streams, "_WAITS", (0.0, 0.0))
    monkeypatch.setattr(workers, "ProcessPoolExecutor", _Here)


def tasks(address):
    return [ShardTask(f"{d}-00000", d, f"data/{d}.json.gz", f"{address}/{d}.json.gz")
            for d in DOMAINS]  # fmt: skip


def bytes_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*.bin")}


def test_two_interrupted_runs_in_a_row_lose_no_domain_and_read_none_again(
    server, here, tokenizer_file, tmp_path
):
    options = {"tokenizer": tokenizer_file, "on_bad_shard": "skip"}
    prepare_tokens(tasks(server), tmp_path / "quiet", **options)
    out = tmp_path / "tokens"
    for finished, cut in ((1, ("pes2o", "wiki")), (2, ("wiki",))):
        _Server.asked.clear()
        _Server.resets.update({f"/{domain}.json.gz": 10**9 for domain in cut})
        with pytest.raises(UnreachableError, match="run the command again"):
            prepare_tokens(tasks(server), out, **options)
        assert not (out / "manifest.json").exists()
        kept = sorted(path.stem for path in (out / "receipts").iterdir())
        assert kept == [f"{domain}-00000" for domain in DOMAINS[:finished]]
        assert all(_Server.asked["GET", f"/{d}.json.gz"] == 0 for d in DOMAINS[: finished - 1])
        _Server.resets.clear()
    _Server.resets["/wiki.json.gz"] = 1  # and one that passes
    _Server.asked.clear()
    manifest = prepare_tokens(tasks(server), out, **options)["train"]
    assert set(manifest.by_domain()) == set(DOMAINS) and manifest.source["skipped"] == {}
    assert bytes_of(out) == bytes_of(tmp_path / "quiet")
    assert all(_Server.asked["GET", f"/{d}.json.gz"] == 0 for d in DOMAINS[:2])


def prepared(address, tokenizer, out):
    """What the fixture ``here`` does, in a process that can be killed."""
    streams._WAITS, workers.ProcessPoolExecutor = (0.0, 0.0), _Here
    prepare_tokens(tasks(address), out, tokenizer=tokenizer)


def test_kills_amid_a_stream_that_is_reset_leave_the_same_bytes(server, tokenizer_file, tmp_path):
    prepared_in = (server, tokenizer_file)
    Running(tmp_path / "0", prepared, *prepared_in, tmp_path / "quiet").succeed()
    out = tmp_path / "tokens"
    for number, domain in enumerate(("pes2o", "wiki"), start=1):
        path = f"/{domain}.json.gz"
        _Server.resets.update({path: 1, "/dclm.json.gz": 1})
        running: list[Running] = []
        _Server.halfway[path] = lambda r=running: r[0].send_signal(signal.SIGKILL)
        running.append(Running(tmp_path / str(number), prepared, *prepared_in, out))
        assert running[0].wait() == -signal.SIGKILL
        assert not (out / "receipts" / f"{domain}-00000.json").exists()
        assert not (out / "manifest.json").exists()
    _Server.resets["/wiki.json.gz"] = 1
    Running(tmp_path / "3", prepared, *prepared_in, out).succeed()
    assert bytes_of(out) == bytes_of(tmp_path / "quiet") and len(bytes_of(out)) == len(DOMAINS)
    assert (out / "manifest.json").read_bytes() == (tmp_path / "quiet/manifest.json").read_bytes()


def test_a_connection_that_is_reset_before_it_answers_is_tried_again(
    server, here, tokenizer_file, tmp_path
):
    kinds = [(kind, "/pes2o.json.gz") for kind in ("GET", "HEAD")]
    _Server.refuses.update(dict.fromkeys(kinds, 3))  # aiohttp itself tries twice
    manifest = prepare_tokens(tasks(server), tmp_path, tokenizer=tokenizer_file)["train"]
    assert set(manifest.by_domain()) == set(DOMAINS)
    assert not any(_Server.refuses[kind] for kind in kinds)


def test_a_size_that_cannot_be_had_is_unreachable(server, here):
    _Server.refuses["HEAD", "/wiki.json.gz"] = _Server.refuses["GET", "/wiki.json.gz"] = 10**9
    with pytest.raises(UnreachableError, match=r"wiki\.json\.gz") as said:
        shard_bytes(f"{server}/wiki.json.gz")
    assert "\n" not in str(said.value)


def test_one_unreachable_shard_does_not_end_the_others(server, here, tokenizer_file, tmp_path):
    """A shard that is under way when another stops is finished: it would be read again."""
    _Server.resets["/dclm.json.gz"] = 10**9
    with pytest.raises(UnreachableError, match=r"dclm\.json\.gz.*run the command again"):
        prepare_tokens(tasks(server), tmp_path, tokenizer=tokenizer_file, on_bad_shard="skip")
    assert sorted(p.stem for p in (tmp_path / "receipts").iterdir()) == [
        "pes2o-00000",
        "wiki-00000",
    ]


@pytest.mark.parametrize(
    "fault", [OSError(5, "Input/output error"), ConnectionResetError("reset"), TimeoutError("late")]
)
def test_a_mounted_disk_that_fails_is_no_corrupt_file(fault):
    class Mounted:
        def __init__(self):
            self.lines = [b'{"text": "a"}\n']

        def readline(self, size):
            if self.lines:
                return self.lines.pop()
            raise fault

    with pytest.raises(UnreachableError, match=r"a\.jsonl .* after document 1") as said:
        list(read_texts(Mounted(), "a.jsonl"))
    assert not isinstance(said.value, BadShardError) and isinstance(said.value, InputError)
