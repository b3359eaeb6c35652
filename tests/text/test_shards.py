"""Every shard format reads the same texts; every broken shard is named."""

import gzip
import io
import json
from contextlib import contextmanager

import pyarrow
import pytest
from pyarrow import parquet

from l2r.errors import InputError
from l2r.text.shards import BadShardError, open_shard, read_texts, shard_bytes
from l2r.text.sources import text_documents

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


@pytest.mark.parametrize("url", ["file:///no/such/shard.jsonl", "nowhere://a/b.jsonl"])
def test_a_url_that_cannot_be_had_is_named_in_one_line(url):
    for read in (open_shard, shard_bytes):
        with pytest.raises(InputError, match=f"^shard {url} cannot be opened: ") as refused:
            read(url)
        assert "\n" not in str(refused.value)


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


@contextmanager
def counted_memory():
    """Memory of pyarrow inside of the block, with the largest that it took."""
    before = pyarrow.default_memory_pool()
    mine = pyarrow.proxy_memory_pool(before)
    pyarrow.set_memory_pool(mine)
    yield mine
    pyarrow.set_memory_pool(before)


def repeated(text, rows, kind):
    """A Parquet file that stores one text once and has it in every row."""
    values = pyarrow.DictionaryArray.from_arrays([0] * rows, [text])
    column = values if kind == "dictionary" else values.cast(kind)
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table({"text": column})
    parquet.write_table(table, sink, compression="zstd", dictionary_pagesize_limit=1 << 30)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_a_parquet_file_that_unpacks_to_a_thousand_times_its_size_is_read_in_parts(
    kind, monkeypatch
):
    monkeypatch.setattr("l2r.text.shards._ROWS", 1 << 20)
    text, rows = "a " * (1 << 18), 200
    data = repeated(text, rows, kind)
    assert len(data) < rows * len(text) / 1000
    with counted_memory() as pool:
        assert sum(read == text for read in read_texts(io.BytesIO(data), "a.parquet")) == rows
    # The value of the dictionary, packed and unpacked, and two rows: 100 MB with all rows.
    assert pool.max_memory() < 16 * len(text)


def test_a_column_of_lists_is_refused_before_it_is_unpacked():
    lists = pyarrow.array([[1.0] * 10**6] * 20)
    data = parquet_bytes({"text": lists})
    refused = r"document 1: column 'text' must be strings; got list"
    with counted_memory() as pool, pytest.raises(BadShardError, match=refused):
        list(read_texts(io.BytesIO(data), "a.parquet"))
    assert pool.max_memory() < 10**6


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json.gz", "a.json.zst", "a.parquet"])
def test_a_document_that_is_too_large_is_refused_by_its_right_name(name, monkeypatch):
    monkeypatch.setattr("l2r.text.shards.MAX_BYTES", 1000)
    data = SHARDS.get(name, b"a" * 1001)
    if name != "a.txt":
        data = {"a.jsonl": bytes, "a.json.gz": gzip.compress, "a.json.zst": zstd}.get(
            name, lambda _: parquet_bytes({"text": ["a" * 1001]})
        )(b'{"text": "' + b"a" * 1001 + b'"}\n')
    with pytest.raises(BadShardError, match=rf"shard {name}, document 1: .* at most 1,000 bytes"):
        list(read_texts(io.BytesIO(data), name))


def test_a_file_of_text_of_any_ending_has_the_same_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("l2r.text.shards.MAX_BYTES", 1000)
    (tmp_path / "notes").write_text("a" * 1001)
    with pytest.raises(BadShardError, match=r"notes must have at most 1,000 bytes"):
        list(text_documents(tmp_path / "notes"))


def test_want_of_memory_is_no_fault_of_the_shard(monkeypatch):
    class Full(io.BytesIO):
        def readline(self, *_):
            raise MemoryError

    with pytest.raises(MemoryError, match=r"shard a.jsonl needs more memory than there is, after"):
        list(read_texts(Full(LINES), "a.jsonl"))
