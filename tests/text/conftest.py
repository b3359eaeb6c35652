"""A small set of shards in the hub's schema, and a tokenizer small enough to train here."""

import gzip
import json
import random

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.checkpoints import checkpoint, model, olmoe_tokenizer, small_tokenizer

__all__ = ["checkpoint", "model", "olmoe_tokenizer", "small_tokenizer"]
WORDS = ["the", "router", "sends", "a", "token", "to", "two", "experts", "and", "its", "loss"]


def make_documents(seed, count):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 40))) for _ in range(count)]


def write_shard_file(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": str(i), "text": text, "added": "2024"} for i, text in enumerate(texts)]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        # No time stamp, so that the same texts are the same bytes.
        path.write_bytes(gzip.compress(data, mtime=0))
    elif path.suffix == ".zst":
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        path.write_bytes(sink.getvalue().to_pybytes())
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        path.write_bytes(data)


@pytest.fixture
def documents():
    """``documents(seed, count)``: texts that a seed decides."""
    return make_documents


@pytest.fixture
def write_shard():
    """``write_shard(path, texts)``: the ending of the path decides the format."""
    return write_shard_file


@pytest.fixture
def shard_folder(tmp_path):
    """Three domains, four shards, one of each format; ``texts`` by path in sorted order."""
    folder = tmp_path / "shards"
    names = [
        "data/dclm/dclm-0000.json.zst",
        "data/dclm/dclm-0001.jsonl",
        "data/pes2o/pes2o-0000.parquet",
        "data/wiki/wiki-0000.json.gz",
    ]
    for seed, name in enumerate(names):
        write_shard_file(folder / name, make_documents(seed, 150))
    return folder


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory):
    """A byte-level BPE of 280 entries with <|endoftext|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_documents(99, 200), trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
