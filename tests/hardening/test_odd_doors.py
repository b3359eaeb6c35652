"""Pipes, devices, names that are no text, files of gigabytes that hold nothing: one line, or done.

A row of ``CASES`` is a file, what stands there, and the command that reads it. A pipe that nobody
writes to would hold a command for ever, a sparse file fill the memory.
"""

import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from l2r.files.reading import read_json
from tests.hardening.test_absurd_files import (
    DIAGNOSE,
    EVIDENCE,
    REPORT,
    RESULT,
    TRAIN,
    Case,
    at,
    changed_line,
    kept,
    own_model,
    prepared,
    small_tokenizer,
    tokenizer_file,
)
from tests.hardening.test_hostile_folders import CHECK, READ, SWAP, index
from tests.tiers import few

__all__ = ["at", "kept", "own_model", "small_tokenizer", "tokenizer_file"]

CONFIG, WEIGHTS = "model/config.json", "model/model.safetensors"
INDEX = "model/model.safetensors.index.json"
AGAINST = ("mismatch", "model", "--against", "routes.safetensors", *CHECK[2:], "--out", "page")
ANSWERS = (
    "mismatch",
    "model",
    "--against",
    "vllm",
    "--answers",
    "a.jsonl",
    *CHECK[2:],
    "--out",
    "page",
)


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def zeros(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def sparse(path):
    """8 GiB that take no place on the disk."""
    path.touch()
    os.truncate(path, 8 << 30)


def without_weights(write):
    def change(path):
        (path.parent / "model.safetensors").unlink()
        write(path)

    return change


CASES = {
    "weights that are a pipe": (WEIGHTS, pipe, CHECK, "is no regular file"),
    "weights that are a device": (WEIGHTS, zeros, CHECK, "is no regular file"),
    "an index that is a pipe": (INDEX, without_weights(pipe), CHECK, "is no regular file"),
    "an index that is a device": (INDEX, without_weights(zeros), SWAP, "is no regular file"),
    "settings of 8 GiB": ("model/generation_config.json", sparse, CHECK, "must have at most"),
    "a tokenizer of 8 GiB": ("model/tokenizer.json", sparse, READ, "must have at most"),
    "a tokenizer that is a pipe": ("model/tokenizer.json", pipe, READ, "is no regular file"),
    "records of 8 GiB": ("run/metrics.jsonl", sparse, REPORT, ""),
    "a diagnosis that is a device": ("run/diagnosis.json", zeros, REPORT, ""),
    "routes that are a pipe": ("routes.safetensors", pipe, AGAINST, "a file of routes"),
    "answers that are a pipe": ("a.jsonl", pipe, ANSWERS, "is no regular file"),
    "answers of 8 GiB": ("a.jsonl", sparse, ANSWERS, "must have at most"),
    "a manifest that is a pipe": ("tokens/manifest.json", pipe, DIAGNOSE, ""),
    "an index of another kind of file": (
        WEIGHTS,
        index({"metadata": {}, "weight_map": {"a": "config.json"}}),
        CHECK,
        "must name .safetensors or .bin",
    ),
    "an index of a name of 5,000 characters": (
        WEIGHTS,
        index({"metadata": {}, "weight_map": {"a": "x" * 5000}}),
        CHECK,
        "must name files of its folder",
    ),
}


@contextmanager
def ended_in(seconds, path):
    """Open a pipe from the other side after a while, so that a reader that waits goes on."""

    def write():
        for file in path.rglob("*"):
            if file.is_fifo():
                os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))
        late.append(path)

    late: list[Path] = []
    timer = threading.Timer(seconds, write)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    assert not late, f"the command waited for {seconds} seconds"


FAST = ["weights that are a pipe", "an index that is a pipe", "settings of 8 GiB"]
FAST += ["records of 8 GiB", "routes that are a pipe", "an index of another kind of file"]


@pytest.mark.parametrize("name", few(CASES, FAST, "every file, one of each kind is fast"))
def test_what_is_no_file_is_refused_and_not_waited_for(name, at, l2r):
    path, write, command, words = CASES[name]
    (at / "text").mkdir()
    (at / "text" / "a.txt").write_text("a cat sat on a mat " * 99)
    write(at / path)
    with ended_in(60, at):
        ended = l2r(*command)
    if words or ended.code == 2:
        line = ended.refusal()
        assert words in line and len(line) < 1000, line
    else:
        assert ended.code == 0, ended


def test_what_a_shell_made_for_the_command_is_read():
    """``<(command)`` gives a pipe in /dev/fd."""
    reader, writer = os.pipe()
    os.write(writer, b'{"seed": 7}')
    os.close(writer)
    assert read_json(Path(f"/dev/fd/{reader}")) == {"seed": 7}
    os.close(reader)


def test_a_text_that_is_no_text_is_refused(l2r, at):
    line = l2r("eval", "model", "--text", "a\udcff cat", "--length", "16").refusal()
    assert line.startswith("error: --text must be in UTF-8")


@pytest.mark.slow("a whole diagnosis")
def test_a_domain_whose_name_is_no_text_is_shown(l2r, at):
    (at / "text" / "d\udcff").mkdir(parents=True)
    (at / "text" / "d\udcff" / "a.txt").write_text("a cat sat on a mat " * 99)
    few_tokens = ("--length", "16", "--instances", "2", "--certify", "0", "--gain", "0")
    ended = l2r("diagnose", "model", "--data", "text", *few_tokens, "--out", "page")
    assert ended.code == 0, ended
    assert "d\\udcff" in (at / "page" / "index.html").read_text()


@pytest.mark.parametrize("name", ["landscape.html", "link.html"])
def test_a_file_does_not_take_the_place_of_a_device(name, l2r, tmp_path):
    """As root, ``--out /dev/null`` would make an ordinary file of it, for the whole machine."""
    os.mkfifo(tmp_path / "landscape.html")
    (tmp_path / "link.html").symlink_to("landscape.html")
    line = l2r("landscape", "--out", tmp_path / name).refusal()
    assert "is no regular file" in line
    assert (tmp_path / "landscape.html").is_fifo() and (tmp_path / "link.html").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


ABSURD = {
    "a map of 5,000 levels": (("check", "model", "--device-map", "[" * 5000), "--device-map must"),
    "a width of 10^15": (
        ("plan", "demo/linear", "model.hidden_size=1000000000000000", "--no-simulate"),
        "too large",
    ),
    "a folder that cannot be": (("swap", "model", "--out", "/proc/new"), "cannot use /proc/new"),
    "10^9 layers": (("plan", "demo/linear", "model.num_hidden_layers=1000000000"), "than or equal"),
    "10^9 layers of a transformer of images": (
        ("train", "demo-vision/linear", "model.num_hidden_layers=1000000000", "--show"),
        "than or equal",
    ),
    "a launcher with half of its quotes": (
        ("compare", "demo", "--routers", "linear", "--launch", "'torchrun"),
        "--launch must be a command",
    ),
    "a launcher of nothing": (
        ("compare", "demo", "--routers", "linear", "--launch", " "),
        "--launch must begin with a program",
    ),
    "a path of 6,000 characters": (("check", "a/" * 3000), "(5,999 characters)"),
}


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_option_is_refused_in_one_line(name, at, l2r):
    command, words = ABSURD[name]
    line = l2r(*command).refusal()
    assert words in line and len(line) < 1000, line


def test_files_of_ours_take_halves_of_characters(tmp_path):
    from l2r.files.atomic import append_text, write_text

    write_text(tmp_path / "page.html", "d\udcff")
    append_text(tmp_path / "page.html", "\udcfe\n")
    assert (tmp_path / "page.html").read_text() == "d\\udcff\\udcfe\n"


def test_a_loss_that_is_a_list_ends_the_records(at, l2r):
    path = at / "run" / "metrics.jsonl"
    line = '{"kind": "validation", "step": 3, "tokens": 24, "ce/mean": [1]}\n'
    path.write_text(path.read_text() + line)
    assert l2r(*REPORT).code == 0


@pytest.mark.parametrize("value", [1e308, -1e200])
def test_a_result_whose_square_is_no_number_is_refused(value, at, l2r):
    case = Case(RESULT, changed_line(trained={"validation_ce": value}), EVIDENCE, "")
    prepared(at, case)
    case.write(at / RESULT)
    line = l2r(*EVIDENCE).refusal()
    assert "is not the result of a cell" in line and "must lie within" in line


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
def test_a_variable_that_is_no_number_is_named(variable, at, l2r, monkeypatch):
    monkeypatch.setenv(variable, "many")
    line = l2r(*TRAIN).refusal()
    assert line == f"error: variable {variable} must be a whole number; got 'many'"
    if variable == "WORLD_SIZE":
        for command in (("compare", "demo", "--routers", "linear"), ("evidence", "decision")):
            assert variable in l2r(*command).refusal()
