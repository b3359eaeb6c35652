"""Absurd files in a folder: one line and exit code 2, never a traceback, never gigabytes.

A row of ``CASES`` is a file, what stands in it, and the command that reads it.
"""

import gzip
import io
import json
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from safetensors.numpy import save

from l2r.files.folder import RunFolder
from l2r.hf.checkpoints.pretrained import save_model
from l2r.text.manifest import TokenizerIdentity
from l2r.text.token_writer import write_token_files
from l2r_lab.files.study import StudyResults
from l2r_lab.studies.registration import read_plan
from tests.checkpoints import small_tokenizer
from tests.hardening.test_foreign_code import own_model
from tests.l2r_lab.studies.studies import SMALL, made_up
from tests.text.conftest import make_documents, tokenizer_file, write_shard_file
from tests.tiers import few

__all__ = ["own_model", "small_tokenizer", "tokenizer_file"]

DEEP = "[" * 100_000 + "]" * 100_000
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
EVAL = ("--tasks", "piqa", "--limit", "1")


@pytest.fixture(scope="session")
def kept(tmp_path_factory, own_model, small_tokenizer, tokenizer_file):
    """Good folders of every kind, which a case damages in a copy: nothing here is written to."""
    root = tmp_path_factory.mktemp("good")
    save_model(own_model, root / "model", tokenizer=small_tokenizer)
    identity = TokenizerIdentity("t", 300, 0)
    for part in ("tokens", "held"):
        ids = [[n % 290 + 5 for n in range(400)]]
        write_token_files(root / part, {"one": ids, "two": ids}, tokenizer=identity)
    write_shard_file(root / "shards" / "data/wiki/wiki-0000.jsonl", make_documents(0, 20))
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    return root


@pytest.fixture
def at(tmp_path, kept, monkeypatch):
    """Copies of the good folders, in the current folder, and a run that has records."""
    import shutil

    shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
    run = RunFolder(tmp_path / "run")
    run.create()
    run.recipe.write_text("task: language\nseed: 0\ntraining: {steps: 2}\n")
    run.write_json(run.environment, {"router_parameters": 5, "parameters": 9})
    for step in (1, 2):
        numbers = {"step": step, "tokens": 8 * step, "ce": 2.0, "balance": 1.0}
        run.append_metrics({"kind": "train", **numbers, "load_entropy": [0.5]})
        run.append_metrics({"kind": "validation", **numbers, "ce/mean": 2.0, "ce/one": 2.0})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def changed(**values: Any) -> Callable[[Path], None]:
    """The same JSON object with some fields replaced; ``a__b`` is field b of a."""

    def write(path: Path) -> None:
        whole = json.loads(path.read_text())
        for name, value in values.items():
            part: Any = whole
            *parents, last = name.split("__")
            for parent in parents:
                part = part[int(parent) if parent.isdecimal() else parent]
            part[last] = value
        path.write_text(json.dumps(whole))

    return write


def changed_line(**values: Any) -> Callable[[Path], None]:
    """The same JSON lines with some fields of the last one replaced."""

    def write(path: Path) -> None:
        *lines, last = path.read_text().splitlines()
        path.write_text("\n".join([*lines, json.dumps({**json.loads(last), **values}), ""]))

    return write


def text(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    return write


def content(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return write


def safetensors_header(**tensors: Any) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header)) + header


HUGE = safetensors_header(
    **{"lm_head.weight": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
)


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def npz_of_bytes(name: str, data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", data)
    return stream.getvalue()


def npy_header(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    values = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, values)
    return stream.getvalue()


def patches(**other: Any) -> dict[str, Any]:
    """Arrays of a patches.npz of one layer, two images, 2 x 2 patches, k = 1."""
    good = {
        "layers": np.array(["0"]),
        "experts": np.zeros((1, 2, 2, 2, 1), np.int64),
        "weights": np.ones((1, 2, 2, 2, 1), np.float32),
        "class_token": np.zeros((1, 2, 1), np.int64),
        "predictions": np.zeros(2, np.int64),
        "num_experts": np.array(4),
        "images": np.zeros((2, 8, 8, 1), np.uint8),
        "labels": np.zeros(2, np.int64),
        "classes": np.array(["a", "b"]),
    }
    return {**good, **other}


def texts(**other: Any) -> dict[str, Any]:
    """Arrays of a text.npz of one layer, two rows of four tokens, four experts, k = 1."""
    part = np.zeros((1, 1, 4), np.float32)
    good = {
        "layers": np.array(["0"]),
        "remarks": np.array([""]),
        "domains": np.array(["one"]),
        "pieces": np.array(["a", "b"]),
        "tokens": np.zeros((2, 4), np.int64),
        "domain": np.zeros(2, np.int64),
        "shown": np.zeros(1, np.int64),
        "experts": np.zeros((1, 1, 4, 1), np.int64),
        "weights": np.ones((1, 1, 4, 1), np.float32),
        **dict.fromkeys(("margin", "entropy", "radius"), part),
        "contexts": np.zeros((1, 4, 2), np.int64),
        "context_weights": np.zeros((1, 4, 2), np.float32),
        "vocabulary": np.zeros((1, 4, 2), np.int64),
        "vocabulary_counts": np.zeros((1, 4, 2), np.int64),
    }
    return {**good, **other}


def diagnosis(text_: str, **arrays: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text_)
        path.with_suffix(".safetensors").write_bytes(save(arrays))

    return write


def numbers(**other: Any) -> str:
    values = {"schema": 1, "info": {"domains": ["one"], "tokens": 4}, "layers": [{"name": "0"}]}
    return json.dumps({**values, "mean": {}, **other})


USE = {f"0.{kind}": np.ones(4) / 4 for kind in ("top1", "topk", "importance")}


class Case(NamedTuple):
    """path: of the file, below the current folder. words: of the line that refuses it."""

    path: str
    write: Callable[[Path], None]
    command: tuple[str, ...]
    words: str


SWAP, REPORT = ("swap", "model", "--out", "new"), ("report", "run")
TRAIN = ("train", "demo/l2r-sips", "data.tokens=[tokens]", "data.validation_tokens=[held]")
TRAIN += ("data.sequence_length=16", "model.hidden_size=16", "model.num_hidden_layers=1")
TRAIN += ("model.intermediate_size=8", "model.num_experts=4", "model.num_experts_per_tok=2")
TRAIN += ("model.num_attention_heads=2", "training.steps=1", "training.global_batch=2")
TRAIN += ("training.micro_batch=2", "evaluation.every=0", "--out", "fresh")
DIAGNOSE = ("diagnose", "model", "--data", "tokens", "--length", "16", "--instances", "2")
PREPARE = (
    "data",
    "prepare",
    "--out",
    "out",
    "--data",
    "shards",
    "--tokenizer",
    "tokenizer",
    "--processes",
    "1",
)
WATCH = ("report", "run", "--watch")
EVIDENCE = ("evidence", "mine.yaml", "--judge-only", "--results", "results", "--out", "page")
RESULT = "results/mine/results.jsonl"
NOT_MANIFEST, NOT_DIAGNOSIS = "is not a token manifest", "cannot be read"
CONFIG, MANIFEST = "model/config.json", "tokens/manifest.json"

CASES = {
    "a tokenizer without anything": Case("model/tokenizer.json", text("{}"), SWAP, "a tokenizer"),
    "a deep tokenizer": Case("model/tokenizer.json", text(DEEP), SWAP, "a tokenizer"),
    "a deep configuration": Case(CONFIG, text(DEEP), SWAP, CONFIG),
    "a list as configuration": Case(CONFIG, text("[1]"), SWAP, "must be a JSON object"),
    "a deep configuration, of any model": Case(CONFIG, text(DEEP), ("eval", "model"), CONFIG),
    "a list as configuration, of any model": Case(CONFIG, text("[]"), ("eval", "model"), CONFIG),
    "architectures of another type": Case(
        CONFIG, changed(architectures=5), ("eval", "model", *EVAL), ""
    ),
    "a field twice": Case(MANIFEST, text('{"format": 1, "format": 2}'), TRAIN, "'format' twice"),
    "no number": Case(MANIFEST, text('{"format": NaN}'), TRAIN, "NaN"),
    "an integer of a million digits": Case(
        CONFIG, text(f'{{"vocab_size": {"9" * 10**6}}}'), ("eval", "model"), CONFIG
    ),
    "weights of 10^12 numbers": Case(
        "model/model.safetensors", content(HUGE), SWAP, "a language model"
    ),
    "a header of 2^63 bytes": Case(
        "model/model.safetensors", content(struct.pack("<Q", 2**63)), SWAP, "a language model"
    ),
    "a vocabulary of 10^12": Case(CONFIG, changed(vocab_size=10**12), SWAP, "a language model"),
    "a manifest's domain that is a list": Case(
        MANIFEST, changed(files__0__domain=[1]), TRAIN, NOT_MANIFEST
    ),
    "a manifest without documents": Case(
        MANIFEST, changed(files__0__documents=None), TRAIN, NOT_MANIFEST
    ),
    "a manifest's name that is no text": Case(
        MANIFEST, changed(files__0__name=5), TRAIN, NOT_MANIFEST
    ),
    "a manifest of 10^12 tokens": Case(
        MANIFEST, changed(files__0__tokens=10**12), TRAIN, "must have 2000000000000 bytes"
    ),
    "held-out tokens of another tokenizer": Case(
        "held/manifest.json", changed(tokenizer__name="u"), TRAIN, "must be of one tokenizer"
    ),
    "a manifest of -1 tokens": Case(MANIFEST, changed(files__0__tokens=-1), TRAIN, NOT_MANIFEST),
    "a manifest with a vocabulary of 10^12": Case(
        MANIFEST, changed(tokenizer__vocab_size=10**12), TRAIN, NOT_MANIFEST
    ),
    "a manifest with an end of text outside the vocabulary": Case(
        MANIFEST, changed(tokenizer__eos_token_id=10**12), TRAIN, NOT_MANIFEST
    ),
    "a manifest that is deep": Case(MANIFEST, text(DEEP), DIAGNOSE, NOT_MANIFEST),
    "a manifest that is a list": Case(MANIFEST, text("[]"), DIAGNOSE, NOT_MANIFEST),
    "a manifest with files of another type": Case(
        MANIFEST, changed(files={"a": 1}), DIAGNOSE, NOT_MANIFEST
    ),
    "token ids outside the vocabulary": Case(
        "tokens/one-00000.bin",
        lambda path: path.write_bytes(b"\xff" * path.stat().st_size),
        TRAIN,
        "token ids",
    ),
    "a tokenizer's configuration that is a list": Case(
        "tokenizer/tokenizer_config.json", text("[]"), PREPARE, "tokenizer_config.json"
    ),
    "an end of text that is a list": Case(
        "tokenizer/tokenizer_config.json", text('{"eos_token": [1]}'), PREPARE, ""
    ),
    "a deep document": Case(
        "shards/data/wiki/wiki-0000.jsonl", text(f'{{"text": {DEEP}}}'), PREPARE, "document 0"
    ),
    "a parquet file of nothing": Case(
        "shards/data/wiki/wiki-0001.parquet",
        content(b"PAR1" + b"\xff" * 64 + b"PAR1"),
        PREPARE,
        "is truncated or corrupt",
    ),
    "a deep receipt": Case("out/receipts/wiki-00000.json", text(DEEP), PREPARE, "wiki-00000.json"),
    "a receipt of another type": Case(
        "out/receipts/wiki-00000.json", text('{"tokenizer": 5}'), PREPARE, "wiki-00000.json"
    ),
    "a plan of shards that is deep": Case(
        "plan.json", text(DEEP), (*PREPARE, "--plan", "plan.json"), "is not a shard plan"
    ),
    "a step without end": Case(
        "fresh/checkpoints/step-00000001/state.json",
        text('{"step": 1e999, "world": 1, "crc32": {}}'),
        TRAIN,
        "no readable state.json",
    ),
    "sums that are a list": Case(
        "fresh/checkpoints/step-00000001/state.json",
        text('{"step": 1, "world": 1, "crc32": [1]}'),
        TRAIN,
        "no readable state.json",
    ),
    "a deep state": Case(
        "fresh/checkpoints/step-00000001/state.json", text(DEEP), TRAIN, "no readable state.json"
    ),
    "a shard of 10^12 numbers": Case(
        "fresh/checkpoints/step-00000001/state.json",
        lambda path: (
            text('{"step": 1, "world": 1, "crc32": {}}')(path),
            (path.parent / "shard-00001-model-00001-of-00001.safetensors").write_bytes(HUGE),
        ),
        TRAIN,
        "cannot be loaded",
    ),
    "facts that are a list": Case("run/environment.json", text("[1]"), REPORT, "environment.json"),
    "deep facts": Case("run/environment.json", text(DEEP), REPORT, "environment.json"),
    "facts of other types": Case(
        "run/environment.json", text('{"packages": 5, "gpus": 7, "parameters": []}'), REPORT, "run"
    ),
    "a recipe that is a list": Case("run/recipe.yaml", text("[1, 2]"), WATCH, "recipe.yaml"),
    "a recipe without sections": Case(
        "run/recipe.yaml", text("training: 5"), WATCH, "recipe.yaml does not hold what it should"
    ),
    "an empty recipe": Case("run/recipe.yaml", text(""), WATCH, "recipe.yaml"),
    "a deep recipe": Case("run/recipe.yaml", text(f"task: {DEEP}"), WATCH, "recipe.yaml"),
    "a recipe that unfolds to 10^9 words": Case(
        "run/recipe.yaml", text(BOMB), WATCH, "recipe.yaml"
    ),
    "a recipe file that unfolds": Case(
        "mine.yaml", text(f"task: language\n{BOMB}seed: *i\n"), ("train", "mine.yaml"), "mine.yaml"
    ),
    "a recipe file inside itself": Case(
        "mine.yaml", text("task: language\nseed: &a [*a]\n"), ("train", "mine.yaml"), "mine.yaml"
    ),
    "a recipe file with a field twice": Case(
        "mine.yaml", text("task: language\nseed: 1\nseed: 2\n"), ("train", "mine.yaml"), "twice"
    ),
    "a recipe file with a day that is none": Case(
        "mine.yaml", text("task: language\nseed: 2020-99-99\n"), ("train", "mine.yaml"), "mine.yaml"
    ),
    "a deep recipe file": Case("mine.yaml", text(DEEP), ("train", "mine.yaml"), "mine.yaml"),
    "a deep value": Case("-", text(""), ("train", "demo/linear", f"seed={DEEP}"), "seed"),
    "a plan that unfolds": Case("mine.yaml", text(BOMB), EVIDENCE, "mine.yaml"),
    "a deep plan": Case("mine.yaml", text(DEEP), EVIDENCE, "mine.yaml"),
    "a plan that is a number": Case("mine.yaml", text("5"), EVIDENCE, "mine.yaml"),
    "a deep result": Case(RESULT, text(f"{DEEP}\n"), EVIDENCE, "is not the result of a cell"),
    "a result without a recipe": Case(
        RESULT, changed_line(recipe=5), EVIDENCE, "is not the result of a cell"
    ),
    "a result of words": Case(
        RESULT,
        changed_line(trained={"validation_ce": "low"}),
        EVIDENCE,
        "is not the result of a cell",
    ),
    "a result without a plan": Case(
        RESULT, changed_line(plan=[]), EVIDENCE, "is not the result of a cell"
    ),
    "a result with a seed without end": Case(
        RESULT,
        lambda path: path.write_text(path.read_text().replace('"seed":0', '"seed":1e999')),
        EVIDENCE,
        "is not the result of a cell",
    ),
    "losses that are words": Case(
        "run/metrics.jsonl",
        text('{"kind": "validation", "step": 1, "ce/mean": "low"}\n'),
        REPORT,
        "",
    ),
    "records of another kind": Case(
        "run/metrics.jsonl",
        text('{"kind": "train", "step": 1, "tokens": [], "ce": {}}\n'),
        REPORT,
        "",
    ),
    "a deep diagnosis": Case("run/diagnosis.json", text(DEEP), REPORT, NOT_DIAGNOSIS),
    "a diagnosis of numbers": Case(
        "run/diagnosis.json", diagnosis(numbers(layers=[1]), **USE), REPORT, NOT_DIAGNOSIS
    ),
    "a diagnosis without facts": Case(
        "run/diagnosis.json", diagnosis(numbers(info=5), **USE), REPORT, NOT_DIAGNOSIS
    ),
    "a diagnosis with arrays of 10^12": Case(
        "run/diagnosis.json",
        lambda path: (
            path.write_text(numbers()),
            path.with_suffix(".safetensors").write_bytes(HUGE),
        ),
        REPORT,
        NOT_DIAGNOSIS,
    ),
    "a diagnosis with arrays of other shapes": Case(
        "run/diagnosis.json",
        diagnosis(numbers(), **{**USE, "0.top1": np.ones((2, 3, 4)), "0.topk": np.ones(0)}),
        REPORT,
        "run",
    ),
    "an array of 10^12 numbers": Case(
        "run/patches.npz",
        content(npz_of_bytes("experts", npy_header((10**12,)))),
        REPORT,
        "cannot read patch routing",
    ),
    "an array of 2^62 x 2^62 numbers": Case(
        "run/text.npz",
        content(npz_of_bytes("tokens", npy_header((2**62, 2**62)))),
        REPORT,
        "cannot read text routing",
    ),
    "patches of other dimensions": Case(
        "run/patches.npz",
        content(npz(**patches(experts=np.zeros(3, np.int64)))),
        REPORT,
        "patch routing",
    ),
    "patches of an expert that is not there": Case(
        "run/patches.npz",
        content(npz(**patches(labels=np.full(2, 10**12)))),
        REPORT,
        "run",
    ),
    "text of other dimensions": Case(
        "run/text.npz",
        content(npz(**texts(contexts=np.zeros((1, 9, 2), np.int64)))),
        REPORT,
        "text routing",
    ),
    "text whose layers are numbers": Case(
        "run/text.npz", content(npz(**texts(weights=np.array(["x"])))), REPORT, "text routing"
    ),
    "results of a task that are a list": Case(
        "model/evaluation/piqa.json",
        lambda path: (
            text("[]")(path),
            text("[]\n")(path.with_name("piqa.documents.jsonl")),
            text(DEEP)(path.with_name("piqa.partial.jsonl")),
        ),
        ("eval", "model", *EVAL),
        "",
    ),
    "an evaluation of other types": Case(
        "evaluation.json",  # of the run whose weights are in model/
        lambda path: (
            text('{"accuracy": [1], "settings": 5}')(path),
            path.with_name("recipe.yaml").write_text("task: language\n"),
        ),
        ("export", "model", "--out", "new"),
        "evaluation.json does not hold what it should",
    ),
}


def prepared(at: Path, case: Case) -> None:
    """What a case needs besides its file."""
    if case.command is EVIDENCE and case.path == RESULT:
        (at / "mine.yaml").write_text(yaml.safe_dump(SMALL))
        for result in made_up(read_plan(str(at / "mine.yaml")), 2, lambda *_: 1.0):
            StudyResults(at / "results" / "mine").append(result)
    if case.path.startswith("fresh"):
        from l2r_lab.training.recipes.load import dump_recipe, load_recipe

        text(dump_recipe(load_recipe(TRAIN[1], TRAIN[2:-2])))(at / "fresh" / "recipe.yaml")


FIRST = {(case.command, Path(case.path).name): name for name, case in reversed(CASES.items())}


@pytest.mark.parametrize(
    "name", few(CASES, list(FIRST.values()), "every field of a file, one case each is fast")
)
def test_an_absurd_file_is_refused_in_one_line(name, at, l2r):
    case = CASES[name]
    prepared(at, case)
    case.write(at / case.path)
    ended = l2r(*case.command)
    if not case.words:  # what is read there is not needed: it is made again
        assert ended.code == 0, ended
        return
    line = ended.refusal()
    assert case.words in line, line
    assert len(line) < 1000, line[:2000]


def test_a_picture_of_10_12_pixels_is_left_out(l2r, tmp_path):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 10**6, 10**6, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b""))
    for name in ("a", "b"):
        for number in range(10):
            content(bomb)(tmp_path / "images" / name / f"{number}.png")
    line = l2r("train", "demo-vision/linear", f"data.images={tmp_path / 'images'}",
               "model.num_labels=2", "--out", tmp_path / "run").refusal()  # fmt: skip
    assert "none of the images can be read" in line


@pytest.mark.parametrize("pack", [gzip.compress, bytes], ids=["gzip", "plain"])
def test_an_idx_file_of_10_12_bytes_is_refused_unread(pack, l2r, tmp_path):
    data = bytes([0, 0, 8, 3]) + struct.pack(">III", 10**4, 10**4, 10**4) + b"\0" * 100
    end = ".gz" if pack is gzip.compress else ""
    content(pack(data))(tmp_path / "images" / f"train-images-idx3-ubyte{end}")
    line = l2r("train", "demo-vision/linear", f"data.images={tmp_path / 'images'}",
               "--out", tmp_path / "run").refusal()  # fmt: skip
    assert "1000000000000 bytes" in line


def test_deep_values_do_not_depend_on_the_limit_of_recursion():
    """A program that raised it must refuse them too."""
    from l2r.files.reading import parse_json

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(200_000)
    try:
        with pytest.raises(ValueError, match="levels"):
            parse_json(b"[" * 5000 + b"]" * 5000, list)
    finally:
        sys.setrecursionlimit(before)
