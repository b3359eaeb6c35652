"""Text becomes batches: files, folders, the same number of rows from every domain."""

import pytest
import torch

from l2r.checkpoints.text_input import open_text


class Letters:
    """A tokenizer that gives every character its code."""

    eos_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}


def read(source, *, instances=4, length=5):
    return open_text(str(source), Letters(), vocab_size=200, instances=instances, length=length)


def test_a_file_is_one_domain_cut_into_rows(tmp_path):
    (tmp_path / "note.txt").write_text("abcdefghijklm")
    text = read(tmp_path / "note.txt")
    assert text.domains == ("note",)
    assert text.rows.tolist() == [[97, 98, 99, 100, 101], [102, 103, 104, 105, 106]]


def test_a_folder_gives_every_sub_folder_the_same_share(tmp_path):
    for domain, letter in (("first", "a"), ("second", "b")):
        (tmp_path / domain).mkdir()
        for number in range(3):
            (tmp_path / domain / f"{number}.txt").write_text(letter * 14)
    text = read(tmp_path, instances=6)
    assert text.domains == ("first", "second")
    assert text.domain.tolist() == [0, 0, 0, 1, 1, 1]
    assert text.rows[2].tolist() == [97, 97, 97, 97, 0]  # end of text after each file
    batches = list(text.batches(4, torch.device("cpu")))
    assert [len(batch["input_ids"]) for batch in batches] == [4, 2]
    assert batches[1]["domain"].tolist() == [1, 1]


def test_too_little_text_and_missing_folders_are_named(tmp_path):
    (tmp_path / "note.txt").write_text("ab")
    with pytest.raises(ValueError, match="data must hold at least 5 tokens"):
        read(tmp_path / "note.txt")
    with pytest.raises(ValueError, match="must exist"):
        read(tmp_path / "nowhere")
