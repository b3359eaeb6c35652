"""Text becomes batches: files, folders, the same number of rows from every domain."""

from types import SimpleNamespace

import pytest
import torch

from l2r.analysis import inputs
from l2r.text import spread_rows
from l2r.text.manifest import TokenizerIdentity
from l2r.text.token_writer import write_token_files


class Letters:
    """A tokenizer that gives every character its code."""

    eos_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}


@pytest.fixture
def read(monkeypatch):
    """What a checkpoint with a vocabulary of 200 reads."""
    config = SimpleNamespace(vocab_size=200)
    config.get_text_config = lambda: config
    model = SimpleNamespace(config=config)
    monkeypatch.setattr(inputs, "is_image_classifier", lambda path: False)
    monkeypatch.setattr(inputs, "load_causal_lm", lambda path, **_: (model, Letters()))

    def read(source, *, instances=4, length=5):
        return inputs.open_subject(
            "checkpoint", str(source), instances=instances, length=length, report=print
        )

    return read


def batches(subject, size):
    return list(subject.batches(size, torch.device("cpu")))


def test_a_file_is_one_domain_cut_into_rows(read, tmp_path):
    (tmp_path / "note.txt").write_text("abcdefghijklm")
    text = read(tmp_path / "note.txt")
    assert text.domains == ("note",) and text.items == 2
    (batch,) = batches(text, 4)
    assert batch["input_ids"].tolist() == [[97, 98, 99, 100, 101], [102, 103, 104, 105, 106]]


def test_a_folder_gives_every_sub_folder_the_same_share(read, tmp_path):
    for domain, letter in (("first", "a"), ("second", "b")):
        (tmp_path / domain).mkdir()
        for number in range(3):
            (tmp_path / domain / f"{number}.txt").write_text(letter * 14)
    text = read(tmp_path, instances=6)
    assert text.domains == ("first", "second")
    first, second = batches(text, 4)
    assert [len(batch["input_ids"]) for batch in (first, second)] == [4, 2]
    assert first["domain"].tolist() == [0, 0, 0, 1] and second["domain"].tolist() == [1, 1]
    assert {97, 98} == {*first["input_ids"].flatten().tolist(), *second["input_ids"][0].tolist()}


def letters(rows):
    return [chr(int(row[0])) for row in rows]


@pytest.fixture
def opened(tmp_path):
    """Rows and the line of a folder of 51 files, each of its own letter."""
    for number in range(51):
        (tmp_path / f"{number:02d}.txt").write_text(chr(100 + number) * 300)

    def opened(instances, length):
        said = []
        sizes = {"vocab_size": 200, "instances": instances, "length": length}
        rows, _, _ = inputs.open_text(str(tmp_path), Letters(), report=said.append, **sizes)
        return rows, said

    return opened


def test_rows_are_spread_over_all_files(opened):
    rows, said = opened(64, 128)
    assert said == ["read 8,192 tokens of 51 of 51 files"]
    assert rows.shape == (64, 128) and len(set(letters(rows))) == 51
    assert letters(rows) == sorted(letters(rows))  # files in order, and each by itself
    assert all(len(set(row.tolist())) == 1 for row in rows)


def test_fewer_rows_than_files_come_from_files_that_lie_evenly(opened):
    rows, said = opened(6, 10)
    assert said == ["read 60 tokens of 6 of 51 files"]
    assert letters(rows) == [chr(100 + number) for number in (0, 10, 20, 30, 40, 50)]


def test_files_shorter_than_a_row_are_packed_and_counted(opened):
    rows, said = opened(3, 500)
    assert said == ["read 1,500 tokens of 5 of 51 files"]
    # of the first file, the middle one and the last the ends; then what else it takes, in order
    assert [int((row == 0).sum()) for row in rows] == [1, 2, 1]


def test_a_long_file_is_tokenized_no_further_than_it_is_read():
    tokenizer, asked = Letters(), []

    class Watched(Letters):
        def __call__(self, text, **options):
            asked.append(len(text))
            return super().__call__(text, **options)

    text = "".join(chr(100 + number % 97) for number in range(10**6))
    ((few, *_), files, of) = spread_rows(Watched(), [[text]], 3, 10)
    assert (files, of) == (1, 1) and few.tolist() == [ord(letter) for letter in text[:10]]
    assert sum(asked) < 1000
    short = [["a"]] * 200  # so that the long one gives more than its share, in several parts
    rows = spread_rows(Watched(), [[text], *short], 5000, 10).rows
    many = torch.cat(rows[:4000])
    assert torch.equal(many, torch.tensor(tokenizer(text)["input_ids"])[: len(many)])


def test_too_little_text_and_missing_folders_are_named(read, tmp_path):
    (tmp_path / "note.txt").write_text("ab")
    with pytest.raises(ValueError, match="data must hold at least 5 tokens"):
        read(tmp_path / "note.txt")
    with pytest.raises(ValueError, match="must exist"):
        read(tmp_path / "nowhere")


def test_without_a_source_the_held_out_text_is_read_in_the_checkpoints_own_tokens(
    monkeypatch, tmp_path
):
    """The embedded corpus has a tokenizer, which nothing but training needs."""
    files = {f"{number}.txt": f"{number}" * 40 for number in range(9)}
    sources = {"digits": lambda: iter(files.items())}
    corpus = "l2r.text.corpus"
    monkeypatch.setattr(f"{corpus}.embedded_sources", lambda version: sources)
    monkeypatch.setattr(f"{corpus}.write_new_tokenizer", None)  # not to be called
    monkeypatch.setenv("L2R_CACHE", str(tmp_path))
    said: list[str] = []
    sizes = {"vocab_size": 200, "instances": 2, "length": 20, "report": said.append}
    rows, _, domains = inputs.open_text(None, Letters(), **sizes)
    assert domains == ("digits",) and len(rows) == 2 and said[0] == "reading digits"
    assert said[1:] == ["read 40 tokens of 2 of 2 held-out texts"]
    assert {chr(token) for token in rows.unique() if token} <= set("012345678")
    with pytest.raises(ValueError, match="no tokenizer, so text cannot be read; pass token files"):
        inputs.open_text(None, None, **sizes)


def test_token_files_give_every_domain_the_same_share_and_small_ones_are_named(
    monkeypatch, tmp_path
):
    identity = TokenizerIdentity("tiny", 200, eos_token_id=0)
    documents = {"large": [[1] * 499], "small": [[2] * 14], "tiny": [[3] * 3]}
    write_token_files(tmp_path, documents, tokenizer=identity)
    said: list[str] = []
    rows, domain, domains = inputs.open_text(
        str(tmp_path), None, vocab_size=200, instances=6, length=5, report=said.append
    )
    assert domains == ("large", "small", "tiny")
    assert domain.tolist() == [0, 0, 0, 1, 1, 1] and len(rows) == 6
    assert said == [
        "domain tiny holds less than one row of 5 tokens: it is left out",
        "read 30 tokens of 2 of 3 files",
    ]


def test_a_folder_of_text_names_a_domain_without_a_row(tmp_path):
    for domain, text in (("first", "a" * 14), ("second", "b")):
        (tmp_path / domain).mkdir()
        (tmp_path / domain / "0.txt").write_text(text)
    said: list[str] = []
    _, domain, domains = inputs.open_text(
        str(tmp_path), Letters(), vocab_size=200, instances=6, length=5, report=said.append
    )
    assert domains == ("first", "second") and domain.tolist() == [0, 0, 0]
    assert said == [
        "domain second holds less than one row of 5 tokens: it is left out",
        "read 15 tokens of 1 of 2 files",
    ]
