"""A shard that streams over a network is read whole, or named as unreachable; never as corrupt."""

import io
import socketserver
import struct
import threading
from contextlib import contextmanager
from socket import SO_LINGER, SOL_SOCKET

import pytest

from l2r.errors import InputError
from l2r.text import streams
from l2r.text.shards import BadShardError, open_shard, read_texts
from l2r.text.streams import UnreachableError, WholeStream
from l2r_lab.training.data.prepare import prepare_tokens
from l2r_lab.training.data.workers import ShardTask
from tests.text.test_shards import SHARDS, TEXTS

FORMATS = ["a.jsonl", "a.json.gz", "a.json.zst", "a.parquet"]
FAULTS = [ConnectionResetError("reset by peer"), TimeoutError("timed out"), OSError("broken"), None]


class Faulty(io.BytesIO):
    """A file whose reads fail after ``left`` bytes of a connection; None: it just ends."""

    def __init__(self, data, left, fault, seeks=True):
        super().__init__(data)
        self.size, self.left, self.fault, self.seeks = len(data), left, fault, seeks

    def seekable(self):
        return self.seeks

    def seek(self, *where):
        if not self.seeks:
            raise io.UnsupportedOperation("seek")
        return super().seek(*where)

    def read(self, size=-1):
        if self.left <= 0:
            if self.fault is None:
                return b""
            raise self.fault
        data = super().read(min(size, self.left) if size >= 0 else self.left)
        self.left -= len(data)
        return data


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """No seconds between tries."""
    monkeypatch.setattr(streams, "_WAITS", (0.0, 0.0))


def texts(name, left, fault, *, seeks=True):
    opened = []

    def open_again():
        opened.append(1)
        return Faulty(SHARDS[name], left, fault, seeks)

    stream = io.BufferedReader(WholeStream("hub://x", open_again), 512)
    return list(read_texts(stream, name)), len(opened)


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
@pytest.mark.parametrize("name", FORMATS)
def test_a_connection_that_breaks_goes_on_where_it_broke(name, fault):
    found, opened = texts(name, 1500, fault)
    assert found == TEXTS and opened > 1


def test_a_stream_that_cannot_seek_is_read_up_to_the_place():
    class Slower(Faulty):
        allowed = 1000

        def __init__(self):
            Slower.allowed += 1000
            super().__init__(SHARDS["a.jsonl"], Slower.allowed, ConnectionResetError("x"), False)

    stream = io.BufferedReader(WholeStream("hub://x", Slower), 512)
    assert list(read_texts(stream, "a.jsonl")) == TEXTS


@pytest.mark.parametrize("name", FORMATS)
def test_a_url_whose_bytes_stop_is_unreachable_and_no_bad_shard(name):
    gone = ConnectionResetError("reset by peer")
    first = [Faulty(SHARDS[name], 1500, gone)]
    stream = WholeStream("hub://x", lambda: first.pop() if first else Faulty(b"", 0, gone))
    with pytest.raises(UnreachableError, match=r"^shard hub://x stopped .*reset by peer") as said:
        list(read_texts(io.BufferedReader(stream, 512), name))
    assert not isinstance(said.value, BadShardError) and "\n" not in str(said.value)


def test_a_file_that_is_gone_is_not_tried_again():
    opened = []

    def open_again():
        opened.append(1)
        return Faulty(b"x" * 9, 0, FileNotFoundError("gone"))

    with pytest.raises(UnreachableError, match="gone"):
        WholeStream("hub://x", open_again).read()
    assert len(opened) == 1


def test_a_bug_is_not_taken_for_the_network():
    opened = []

    def open_again():
        opened.append(1)
        return Faulty(b"x" * 9, 0, KeyError("ours"))

    with pytest.raises(KeyError):
        WholeStream("hub://x", open_again).read()
    assert len(opened) == 1


class _Resets(socketserver.StreamRequestHandler):
    """HTTP with ranges, which resets every connection after so many bytes of a body."""

    data, most, cut = SHARDS["a.json.gz"], 900, 0

    def handle(self):
        head = b""
        while line := self.rfile.readline().strip():
            head += line + b"\n"
        start, end = 0, len(self.data)
        for line in head.splitlines():
            if line.lower().startswith(b"range: bytes="):
                first, _, last = line.partition(b"=")[2].partition(b"-")
                start, end = int(first), min(end, int(last or end) + 1)
        body = self.data[start:end]
        status = f"206 Partial Content\r\nContent-Range: bytes {start}-{end - 1}/{len(self.data)}"
        self.wfile.write(
            f"HTTP/1.1 {status}\r\nAccept-Ranges: bytes\r\nContent-Length: {len(body)}\r\n"
            f"Connection: close\r\n\r\n".encode()
        )
        if head.startswith(b"HEAD"):
            return
        if _Resets.cut and len(body) > self.most:
            _Resets.cut -= 1
            self.wfile.write(body[: self.most])
            self.wfile.flush()
            self.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            return
        self.wfile.write(body)


@contextmanager
def serving(cut):
    _Resets.cut = cut
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Resets) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/a.json.gz"
        finally:
            server.shutdown()


def test_a_server_that_resets_twice_gives_the_whole_shard():
    pytest.importorskip("aiohttp", reason="fsspec reads http with it")
    with serving(2) as url, open_shard(url) as stream:
        assert list(read_texts(stream, url)) == TEXTS
    assert _Resets.cut == 0


@pytest.mark.slow("worker processes, and seconds between tries")
def test_skip_does_not_leave_out_a_shard_of_a_server_that_is_down(tokenizer_file, tmp_path):
    pytest.importorskip("aiohttp", reason="fsspec reads http with it")
    with serving(10**9) as url:
        tasks = [ShardTask("one-00000", "one", "a.json.gz", url)]
        options = {"tokenizer": tokenizer_file, "on_bad_shard": "skip"}
        with pytest.raises(InputError, match="stopped coming"):
            prepare_tokens(tasks, tmp_path / "tokens", **options)
        assert not (tmp_path / "tokens" / "manifest.json").exists()
        _Resets.cut = 0
        manifest = prepare_tokens(tasks, tmp_path / "tokens", **options)["train"]
    assert manifest.source["skipped"] == {} and sum(manifest.by_domain()["one"]) > 0
