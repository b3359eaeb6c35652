"""Every shard format reads the same texts; every broken shard is named."""

import gzip
import io
import json

import pyarrow
import pytest
from pyarrow import parquet

from l2r.training.data.shards import BadShardError, open_shard, read_texts, shard_bytes

TEXTS = [f"document {i} é\nline two " * 20 for i in range(300)]
LINES = b"".join(
    json.dumps({"id": str(i), "text": t}).encode() + b"\n" for i, t in enumerate(TEXTS)
)
HALF = LINES.index(b"\n", len(LINES) // 2) + 1


def zstd(data):
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def parquet_bytes(columns):
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


SHARDS = {
    "a.jsonl": LINES,
    "a.json": LINES.rstrip(b"\n"),
    "a.json.gz": gzip.compress(LINES),
    "two-members.jsonl.gz": gzip.compress(LINES[:HALF]) + gzip.compress(LINES[HALF:]),
    "a.json.zst": zstd(LINES),
    "two-frames.jsonl.zstd": zstd(LINES[:HALF]) + zstd(LINES[HALF:]),
    "a.parquet": parquet_bytes({"id": [str(i) for i in range(300)], "text": TEXTS}),
}


@pytest.mark.parametrize("name", SHARDS)
def test_every_format_gives_the_same_texts(name):
    assert list(read_texts(io.BytesIO(SHARDS[name]), name)) == TEXTS


def test_url_and_path_are_read_alike(tmp_path):
    import fsspec

    (tmp_path / "a.json.gz").write_bytes(SHARDS["a.json.gz"])
    with fsspec.open("memory://shards/a.json.gz", "wb") as stream:
        stream.write(SHARDS["a.json.gz"])
    for url in (str(tmp_path / "a.json.gz"), "memory://shards/a.json.gz"):
        assert shard_bytes(url) == len(SHARDS["a.json.gz"])
        with open_shard(url) as stream:
            assert list(read_texts(stream, url)) == TEXTS


def test_hub_urls_name_repository_commit_and_file():
    import fsspec
    from huggingface_hub import HfFileSystem

    url = "hf://datasets/allenai/OLMoE-mix-0924@c0ffee/data/wiki/wiki-0000.json.gz"
    filesystem, path = fsspec.core.url_to_fs(url)
    assert isinstance(filesystem, HfFileSystem)
    assert path == url.removeprefix("hf://")


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.json.zst", "a.parquet"])
def test_truncated_shard_is_named(name):
    with pytest.raises(BadShardError, match=f"shard {name} is truncated or corrupt after document"):
        list(read_texts(io.BytesIO(SHARDS[name][:-40]), name))


@pytest.mark.parametrize("name", ["a.json.gz", "a.json.zst"])
def test_flipped_byte_is_noticed(name):
    with pytest.raises(BadShardError, match=f"shard {name} is truncated or corrupt"):
        list(read_texts(io.BytesIO(flipped(SHARDS[name])), name))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"body": "x"}\n', "line 1: no field 'text'; it has 'body'"),
        ("a.jsonl", b'{"text": null}\n', "field 'text' must be a string; got NoneType"),
        ("a.jsonl", b"[1]\n", "line 1: it must be a JSON object; got list"),
        ("a.jsonl", b'{"text": "\xff"}\n', "truncated or corrupt after document 0"),
        ("a.parquet", parquet_bytes({"body": ["x"]}), "no column 'text'; it has body"),
        ("a.json.gz", b"", "holds no documents"),
        ("a.csv", b"text\n", "shard a.csv must end in .txt .json.gz"),
    ],
)
def test_wrong_schema_or_format_is_named(name, data, message):
    with pytest.raises(BadShardError, match=message):
        list(read_texts(io.BytesIO(data), name))


@pytest.mark.parametrize("ending", [".json.gz", ".json.zst", ".jsonl", ".parquet"])
def test_the_stream_stays_open_for_whoever_opened_it(ending, documents, write_shard, tmp_path):
    """The progress of a shard is asked for once more after its last document."""
    write_shard(tmp_path / f"a{ending}", documents(0, 70))
    with open_shard(str(tmp_path / f"a{ending}")) as stream:
        assert list(read_texts(stream, f"a{ending}")) == documents(0, 70)
        assert 0 < stream.tell() <= (tmp_path / f"a{ending}").stat().st_size


def test_half_a_surrogate_pair_is_replaced_and_a_whole_one_is_its_character():
    lines = b'{"text": "a \\ud800 b"}\n{"text": "\\ud83d\\ude00"}\n'
    assert list(read_texts(io.BytesIO(lines), "x.jsonl")) == ["a \ufffd b", "\U0001f600"]
