"""The fingerprint of a checkpoint changes with what results depend on, and with nothing else."""

import os

import pytest

from l2r.hf.checkpoints.folders import checkpoint_digest

SMALL = [
    "config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "qwen.tiktoken",
    "modeling_own.py",
]
OTHER = ["README.md", "evaluation.json", "diagnosis.json", "generation_config.json"]


@pytest.fixture
def folder(tmp_path):
    for name in [*SMALL, *OTHER, "model.safetensors", "pytorch_model.bin"]:
        (tmp_path / name).write_text(name)
    return tmp_path


def rewrite(path, text, *, later=0):
    """Other content, at the same time or ``later`` by nanoseconds."""
    times = path.stat()
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + later))


@pytest.mark.parametrize("name", SMALL)
def test_small_files_count_by_their_content(folder, name):
    before = checkpoint_digest(folder)
    rewrite(folder / name, name, later=10**9)
    assert checkpoint_digest(folder) == before
    rewrite(folder / name, name[::-1])
    assert checkpoint_digest(folder) != before
    (folder / name).unlink()
    assert checkpoint_digest(folder) != before


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_weights_count_by_size_and_time(folder, name):
    before = checkpoint_digest(folder)
    rewrite(folder / name, name + "longer")
    longer = checkpoint_digest(folder)
    rewrite(folder / name, name, later=10**9)
    assert len({before, longer, checkpoint_digest(folder)}) == 3


def test_results_and_cards_do_not_count(folder):
    before = checkpoint_digest(folder)
    for name in OTHER:
        rewrite(folder / name, "other", later=10**9)
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "tokenizer.json").write_text("{}")
    assert checkpoint_digest(folder) == before
