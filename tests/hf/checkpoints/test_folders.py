"""What a folder holds is read off its files, and a tokenizer in any of its forms is found."""

import json

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from l2r.hf.checkpoints.folders import check_reads, check_reads_text, has_tokenizer
from l2r.hf.checkpoints.pretrained import load_tokenizer


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmoe"}))
    return tmp_path


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "tokenizer.model", "tekken.json"])
def test_each_form_of_a_tokenizer_counts(folder, name):
    assert not has_tokenizer(folder)
    with pytest.raises(ValueError, match="the checkpoint has no tokenizer"):
        check_reads_text(folder)
    (folder / name).write_text("{}")
    assert has_tokenizer(folder)
    check_reads_text(folder)


def test_a_tokenizer_of_vocabulary_and_merges_is_loaded(folder):
    vocabulary = {letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": 256}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    assert load_tokenizer(folder).decode(load_tokenizer(folder)("hello")["input_ids"]) == "hello"


def test_token_files_need_no_tokenizer_and_text_does(folder):
    (folder / "tokens").mkdir()
    (folder / "tokens" / "manifest.json").write_text("{}")
    check_reads(folder, folder / "tokens")
    for source in (None, folder):
        with pytest.raises(ValueError, match="or pass a folder of token files as --data"):
            check_reads(folder, source)


def test_images_come_from_a_run_or_are_named(folder):
    images = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    (folder / "config.json").write_text(json.dumps(images))
    check_reads(folder, "digits")
    with pytest.raises(ValueError, match="is no run folder, so --data must name images"):
        check_reads(folder, None)
    (folder / "recipe.yaml").write_text("task: vision")  # as a quantizer leaves one
    with pytest.raises(ValueError, match="is no run folder"):
        check_reads(folder, None)
    (folder / "model").mkdir()
    (folder / "config.json").rename(folder / "model" / "config.json")
    check_reads(folder, None)
