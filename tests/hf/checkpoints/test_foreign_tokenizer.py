"""Tokenizers that panic, raise, or grow: one line, wherever text is read."""

import base64
import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from l2r.hf.checkpoints import load_tokenizer, token_ids, tokenizer_errors
from l2r.text.losses_on_text import read_tokens
from l2r.text.rows import spread_rows
from l2r.text.tokenizer import load_tokenizer as load_for_data

LETTERS = {letter: number for number, letter in enumerate(["<|endoftext|>", *"ab "])}


@pytest.fixture
def folder(tmp_path):
    tokenizer = Tokenizer(models.WordLevel(LETTERS, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "olmoe"}')
    return tmp_path


def change(folder, file="tokenizer.json", **fields):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def charsmap(data):
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def replaced(content, times):
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times}


def sequence(name):
    return {"Sequence": {"id": name, "type_id": 0}}


BAD = {
    "a map of characters that is none": ({"normalizer": charsmap(b"\xff" * 40)}, "fails"),
    "a map that points outside itself": (
        {"normalizer": charsmap(b"\4\0\0\0" + b"\xff" * 4)},
        "fails: index out of bounds",
    ),
    "a text that doubles forty times": (
        {"normalizer": replaced("aa", 40)},
        "normalizer makes a text more than 1,000 times longer",
    ),
    "ten thousand steps": ({"normalizer": replaced("b", 10_000)}, "must have <= 1,000 steps"),
    "a decoder that grows": (
        {"decoder": {"type": "Sequence", "decoders": replaced("aa", 40)["normalizers"]}},
        "decoder makes a text more than 1,000 times longer",
    ),
    "ten thousand tokens after every text": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [sequence("A"), *[{"SpecialToken": {"id": "a", "type_id": 0}}] * 10_000],
                "pair": [sequence("A"), sequence("B")],
                "special_tokens": {"a": {"id": "a", "ids": [1], "tokens": ["a"]}},
            }
        },
        "post_processor must have <= 1,000 steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("opens", [load_tokenizer, load_for_data], ids=["model", "data"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_tokenizer_is_refused_when_it_is_opened(name, opens, folder, capfd):
    fields, message = BAD[name]
    change(folder, **fields)
    with pytest.raises(ValueError, match=message) as error:
        opens(folder)
    assert "\n" not in str(error.value)
    assert "panicked" not in capfd.readouterr().err


def test_a_longest_text_that_is_no_number_is_refused(folder):
    change(folder, "tokenizer_config.json", model_max_length="x")
    with pytest.raises(ValueError, match="model_max_length must be a number; got 'x'"):
        load_tokenizer(folder)


def test_a_word_that_is_in_no_vocabulary_is_refused_where_it_is_read(folder):
    """Not before: text of its own words is read by such a tokenizer."""
    change(folder, model={"type": "WordLevel", "vocab": LETTERS, "unk_token": "none"})
    tokenizer = load_tokenizer(folder)
    assert token_ids(tokenizer, "ab a") == [1, 2, 3, 1]
    reads = (
        lambda: token_ids(tokenizer, "abc"),
        lambda: spread_rows(tokenizer, [["abc"]], 1, 2),
        lambda: read_tokens(tokenizer, "abc", 10),
    )
    for read in reads:
        with pytest.raises(ValueError, match=r"the tokenizer fails: WordLevel error: Missing"):
            read()


def test_a_good_tokenizer_and_what_is_said_meanwhile_are_left_alone(folder, capfd, monkeypatch):
    import os

    steps = [normalizers.Replace(" ", "  "), normalizers.Prepend("a"), normalizers.Lowercase()]
    state = json.loads(normalizers.Sequence(steps).__getstate__())
    change(folder, normalizer=state)
    from l2r.hf.checkpoints import pretrained

    real = pretrained.AutoTokenizer.from_pretrained
    said = lambda *a, **k: (os.write(2, b"a warning\n"), real(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(pretrained.AutoTokenizer, "from_pretrained", said)
    assert token_ids(load_tokenizer(folder), "A b") == [1, 1, 3, 3, 2]
    assert capfd.readouterr().err == "a warning\n"


def test_other_ends_of_a_block_pass():
    for error in (KeyboardInterrupt, SystemExit, MemoryError, FileNotFoundError("x")):
        with pytest.raises(error if isinstance(error, type) else type(error)), tokenizer_errors():
            raise error
