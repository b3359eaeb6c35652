"""Hostile values in folders, text, weights, routes and recipes: done, or one line; no traceback.

A row of ``CASES`` is a file, what stands in it, and the command that reads it. Beside
test_absurd_files.py, whose cases are of size and depth, these are of kind: a value of another type,
a name that leads elsewhere, a file that says another thing than it holds.
"""

import gzip
import json
import os
import struct
import zipfile

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import load, save

from tests.hardening.test_absurd_files import (
    DIAGNOSE,
    PREPARE,
    REPORT,
    TRAIN,
    at,
    changed,
    content,
    diagnosis,
    kept,
    npz,
    numbers,
    own_model,
    patches,
    small_tokenizer,
    text,
    tokenizer_file,
)
from tests.tiers import few

__all__ = ["at", "kept", "own_model", "small_tokenizer", "tokenizer_file"]

CONFIG, TOKENIZER, WEIGHTS = "model/config.json", "model/tokenizer.json", "model/model.safetensors"
SETTINGS = "model/tokenizer_config.json"
CHECK = ("check", "model", "--data", "tokens", "--instances", "2", "--length", "16")
READ = ("eval", "model", "--data", "text", "--length", "16")
SWAP = ("swap", "model", "router.kind=linear", "--out", "new")
TEXT = ("data", "tokenizer", "--data", "text", "--out", "new", "--vocab-size", "300")
MISMATCH = ("mismatch", "model", "--routes", "routes.safetensors", *CHECK[2:], "--out", "page")


def header(**tensors):
    data = json.dumps(tensors).encode()
    return struct.pack("<Q", len(data)) + data


def tensor(shape, begin, end, kind="F32"):
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


def weights(change):
    """The same tensors, of which one is changed."""

    def write(path):
        tensors = load(path.read_bytes())
        change(tensors)
        path.write_bytes(save(tensors, {"format": "pt"}))

    return write


def index(content):
    def write(path):
        path.with_name("model.safetensors.index.json").write_text(json.dumps(content))
        path.unlink()

    return write


def table(column):
    def write(path):
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table({"text": column}), path)

    return write


def pipe(path):
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)


def twice(path):
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "w") as archive:
        for _ in range(2):
            archive.writestr("images.npy", b"x")


def routes(metadata, **arrays):
    return content(save(arrays, metadata))


FORMAT = {"format": "l2r-routes-1"}
LINE = json.dumps({"text": "a cat sat on a mat " * 9}).encode() + b"\n"

CASES = {
    # configurations
    "labels that are a number": (CONFIG, changed(id2label=5), CHECK),
    "kinds of layers that are objects": (CONFIG, changed(layer_types=[{}]), CHECK),
    "positions that are a number": (CONFIG, changed(rope_parameters=5), CHECK),
    "positions with a factor in words": (
        CONFIG,
        changed(rope_parameters={"rope_type": "yarn", "factor": "x", "rope_theta": 1}),
        CHECK,
    ),
    "positions of a base of nothing": (
        CONFIG,
        changed(rope_parameters={"rope_type": "default", "rope_theta": 0}),
        CHECK,
    ),
    "a type of numbers that is none": (CONFIG, changed(dtype="float7"), CHECK),
    "a type of numbers that is a number": (CONFIG, changed(dtype=5), CHECK),
    "an architecture of another module": (CONFIG, changed(architectures=["os.system"]), CHECK),
    "an architecture that is an object": (CONFIG, changed(architectures=[{"a": 1}]), CHECK),
    "a type of model that is a list": (CONFIG, changed(model_type=["a"]), CHECK),
    "a type of model that is a path": (CONFIG, changed(model_type="../../etc/passwd"), CHECK),
    "an activation that is none": (CONFIG, changed(hidden_act="nope"), CHECK),
    "heads that do not divide the width": (CONFIG, changed(num_attention_heads=5), CHECK),
    "a router of a number": (CONFIG, changed(router=5), CHECK),
    "a router of an unknown kind": (CONFIG, changed(router={"kind": "\u001b[2J"}), CHECK),
    "a router with a rank in words": (CONFIG, changed(router__rank="two"), CHECK),
    "a quantizer that is none": (CONFIG, changed(quantization_config={"quant_method": "x"}), CHECK),
    "a quantizer that is a list": (CONFIG, changed(quantization_config=[1]), CHECK),
    "an end of text in words": (CONFIG, changed(eos_token_id="x"), READ),
    "a context of nothing": (CONFIG, changed(max_position_embeddings=0), READ),
    "a context in words": (CONFIG, changed(max_position_embeddings="x"), READ),
    "experts per token in words": (CONFIG, changed(num_experts_per_tok="two"), CHECK),
    "a swap that is a number": (CONFIG, changed(l2r_swap=5), CHECK),
    "a swap of layers in words": (CONFIG, changed(l2r_swap={"layers": "x", "router": {}}), CHECK),
    "an epsilon in words": (CONFIG, changed(rms_norm_eps="a"), CHECK),
    "an epsilon without end": (
        CONFIG,
        text('{"model_type": "olmoe", "rms_norm_eps": 1e999}'),
        CHECK,
    ),
    "code without trust": (CONFIG, changed(auto_map={"AutoConfig": "a.B"}), CHECK),
    "code of another folder": (CONFIG, changed(auto_map={"AutoModel": "../x--a.B"}), CHECK),
    "generation that is a list": ("model/generation_config.json", text("[1]"), CHECK),
    "a text's configuration that is a number": (CONFIG, changed(text_config=5), CHECK),
    # tokenizers
    "a tokenizer's class of another module": (SETTINGS, changed(tokenizer_class="os"), READ),
    "a tokenizer's class that is a number": (SETTINGS, changed(tokenizer_class=5), READ),
    "an end of text that is an object": (SETTINGS, changed(eos_token={"a": [1]}), READ),
    "a template that is a number": (SETTINGS, changed(chat_template=5), READ),
    "a vocabulary of another folder": (SETTINGS, changed(vocab_file="/etc/passwd"), READ),
    "an entry with an id of 10^9": (
        TOKENIZER,
        changed(model__vocab={"a": 10**9, "<|endoftext|>": 0}),
        READ,
    ),
    "an unknown token outside of the vocabulary": (
        TOKENIZER,
        changed(model={"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]]}),
        READ,
    ),
    "padding to 10^9 tokens": (
        TOKENIZER,
        changed(
            padding={
                "strategy": {"Fixed": 10**9},
                "direction": "Right",
                "pad_id": 0,
                "pad_to_multiple_of": None,
                "pad_type_id": 0,
                "pad_token": "a",
            }
        ),
        READ,
    ),
    "padding to multiples of 10^9": (
        TOKENIZER,
        changed(
            padding={
                "strategy": "BatchLongest",
                "direction": "Right",
                "pad_id": 0,
                "pad_to_multiple_of": 10**9,
                "pad_type_id": 0,
                "pad_token": "a",
            }
        ),
        READ,
    ),
    "added tokens of another type": (TOKENIZER, changed(added_tokens=[5]), READ),
    # weights and their index
    "numbers of an unknown type": (
        WEIGHTS,
        content(header(a=tensor([1], 0, 4, "X9")) + b"abcd"),
        CHECK,
    ),
    "tensors that overlap": (
        WEIGHTS,
        content(header(a=tensor([2], 0, 8), b=tensor([2], 4, 12)) + b"a" * 12),
        CHECK,
    ),
    "a tensor that ends before it begins": (WEIGHTS, content(header(a=tensor([1], 4, 0))), CHECK),
    "a tensor of -1 numbers": (WEIGHTS, content(header(a=tensor([-1], 0, 4)) + b"abcd"), CHECK),
    "facts of weights that are a list": (WEIGHTS, content(header(__metadata__=[1])), CHECK),
    "a tensor with a name that steers": (
        WEIGHTS,
        weights(lambda t: t.update({"\u001b]0;evil\u0007": np.zeros(1, np.float32)})),
        CHECK,
    ),
    "weights of whole numbers": (
        WEIGHTS,
        weights(lambda t: t.update({n: v.astype(np.int8) for n, v in t.items()})),
        CHECK,
    ),
    "an index of another folder": (
        WEIGHTS,
        index({"metadata": {}, "weight_map": {"a": "../tokens/x.safetensors"}}),
        SWAP,
    ),
    "an index without files": (WEIGHTS, index({"metadata": {}, "weight_map": {}}), SWAP),
    "an index that is a list of names": (WEIGHTS, index({"weight_map": ["a"]}), SWAP),
    "an index of files that are not there": (
        WEIGHTS,
        index({"metadata": {}, "weight_map": {"a": "b.safetensors"}}),
        CHECK,
    ),
    # text
    "text of two bytes a character": ("text/a.txt", content("text".encode("utf-16")), READ),
    "gzip that is cut": ("text/a.jsonl.gz", content(gzip.compress(LINE * 9)[:-9]), READ),
    "gzip with more behind it": ("text/a.jsonl.gz", content(gzip.compress(LINE) + b"more"), READ),
    "gzip of gzip": ("text/a.jsonl.gz", content(gzip.compress(gzip.compress(LINE))), READ),
    "text that is a pipe": ("text/a.txt", pipe, READ),
    "text that is a device": (
        "text/a.txt",
        lambda p: (p.parent.mkdir(), p.symlink_to("/dev/zero")),
        READ,
    ),
    "rows that are lists": ("text/a.parquet", table([[1], [2]]), READ),
    "rows of nothing": ("text/a.parquet", table(pyarrow.array([None, None], "string")), READ),
    "no rows": ("text/a.parquet", table(pyarrow.array([], "string")), TEXT),
    "rows of bytes": ("text/a.parquet", table([b"\xff", b"\xfe"]), TEXT),
    "a name that steers": (
        "shards/data/wiki/\u001b]0;evil\u0007.jsonl",
        content(b"no JSON\n"),
        PREPARE,
    ),
    # arrays, routes and pages
    "an array twice": ("run/patches.npz", twice, REPORT),
    "an array of objects": (
        "run/patches.npz",
        content(npz(**patches(classes=np.array([{}])))),
        REPORT,
    ),
    "routes of another format": (
        "routes.safetensors",
        routes({"format": "x"}, a=np.zeros(1)),
        MISMATCH,
    ),
    "routes without arrays": (
        "routes.safetensors",
        routes({**FORMAT, "fingerprint": "{}"}),
        MISMATCH,
    ),
    "routes of a deep fingerprint": (
        "routes.safetensors",
        routes(
            {**FORMAT, "fingerprint": "[" * 9999},
            experts=np.zeros((1, 1, 1), np.int64),
            lengths=np.ones(1, np.int64),
            counts=np.ones(1, np.int64),
            positions=np.zeros(1, np.int64),
        ),
        MISMATCH,
    ),
    "routes that are no safetensors": ("routes.safetensors", content(b"PK\3\4" * 9), MISMATCH),
    "a diagnosis with markup": (
        "run/diagnosis.json",
        diagnosis(numbers(layers=[{"name": "</script><script>alert(1)</script>"}])),
        REPORT,
    ),
    "facts with markup": (
        "run/environment.json",
        text('{"packages": {"<script>": "<img onerror=a>"}, "parameters": 9}'),
        REPORT,
    ),
    # recipes
    "a recipe with an object of Python": (
        "mine.yaml",
        text("task: !!python/object/apply:os.system [id]\n"),
        ("train", "mine.yaml"),
    ),
    "a recipe of 10^30 steps": (
        "mine.yaml",
        text("base: demo/linear\ntraining: {steps: 1000000000000000000000000000000}\n"),
        ("train", "mine.yaml", "--show"),
    ),
    "a recipe whose text is a device": (
        "mine.yaml",
        text("base: demo/linear\ndata: {corpus: /dev/zero}\n"),
        ("train", "mine.yaml"),
    ),
    "a recipe based on itself": ("mine.yaml", text("base: mine.yaml\n"), ("train", "mine.yaml")),
    "a recipe with a name that steers": (
        "mine.yaml",
        text('base: demo/linear\n"\\e]0;evil\\a": 1\n'),
        ("train", "mine.yaml"),
    ),
    "tokens that are a pipe": (
        "tokens/one-00000.bin",
        lambda p: (p.unlink(), os.mkfifo(p)),
        DIAGNOSE,
    ),
    "a manifest of another folder": (
        "tokens/manifest.json",
        changed(files__0__name="../held/one-00000"),
        TRAIN,
    ),
}

FIRST = {(case[0], case[2]): name for name, case in reversed(CASES.items())}


@pytest.mark.parametrize("name", few(CASES, list(FIRST.values()), "every value, one each is fast"))
def test_a_hostile_file_is_read_or_refused_in_one_line(name, at, l2r):
    path, write, command = CASES[name]
    if command == READ and not path.startswith("text/"):
        text("a cat sat on a mat\n" * 20)(at / "text" / "a.txt")
    write(at / path)
    ended = l2r(*command)
    said = ended.out + ended.err
    assert "Traceback" not in said and "panicked" not in said, said[-2000:]
    assert "\x1b]0;" not in said and "\x1b[2J" not in said
    assert ended.code in (0, 1) or len(ended.refusal()) < 1000, ended
    for page in at.rglob("*.html"):
        assert "<script>alert" not in page.read_text()
