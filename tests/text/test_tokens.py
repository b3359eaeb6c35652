"""Token files: packing, order, and every way a folder can be wrong."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from l2r.errors import PathError
from l2r.text.manifest import TokenizerIdentity, read_manifest
from l2r.text.shuffling import epoch_order
from l2r.text.token_writer import TokenWriter, write_token_files
from l2r.text.tokens import TokenDataset, read_documents

EOS = 9
IDENTITY = TokenizerIdentity("tiny", vocab_size=10, eos_token_id=EOS)


def small_folder(tmp_path, tokenizer=IDENTITY):
    documents = {
        "web": [[1, 2, 3], [4, 5], [], [6, 7, 8, 1, EOS], [2] * 7],
        "code": [[3] * 5, [4]],
    }
    write_token_files(tmp_path, documents, tokenizer=tokenizer)
    return tmp_path


def loop_instances(documents, length):
    """Independent packing: one list per domain, cut from the front, remainder dropped."""
    instances = []
    for domain, texts in documents:
        stream = []
        for text in texts:
            if text:
                stream += text if text[-1] == EOS else [*text, EOS]
        while len(stream) >= length:
            instances.append((domain, stream[:length]))
            stream = stream[length:]
    return instances


def test_instances_are_joined_documents_cut_to_length_remainder_dropped(tmp_path):
    dataset = TokenDataset(small_folder(tmp_path), 4)
    expected = loop_instances(
        [("web", [[1, 2, 3], [4, 5], [6, 7, 8, 1, EOS], [2] * 7]), ("code", [[3] * 5, [4]])], 4
    )
    got = [dataset[i] for i in range(len(dataset))]
    assert [
        (dataset.domains[item["domain"]], item["input_ids"].tolist()) for item in got
    ] == expected
    assert got[0]["input_ids"].dtype == torch.int64
    rows = dataset.rows([2, 0])
    assert rows["input_ids"].tolist() == [expected[2][1], expected[0][1]]


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_dtype_follows_the_vocabulary_and_the_largest_id_survives(tmp_path, vocab, dtype):
    identity = TokenizerIdentity("big", vocab_size=vocab, eos_token_id=0)
    write_token_files(tmp_path, {"web": [[vocab - 1, 1]]}, tokenizer=identity)
    assert json.loads((tmp_path / "manifest.json").read_text())["dtype"] == dtype
    assert TokenDataset(tmp_path, 2)[0]["input_ids"].tolist() == [vocab - 1, 1]


def test_documents_are_read_back_with_their_boundaries(tmp_path):
    found = [(domain, ids.tolist()) for domain, ids in read_documents(small_folder(tmp_path))]
    assert found[:3] == [("web", [1, 2, 3, 9]), ("web", [4, 5, 9]), ("web", [6, 7, 8, 1, 9])]
    assert found[-1] == ("code", [4, 9])
    assert read_manifest(tmp_path).tokens == sum(len(ids) for _, ids in found)


def test_several_folders_are_one_dataset(tmp_path):
    one, two = small_folder(tmp_path / "one"), small_folder(tmp_path / "two")
    assert len(TokenDataset([one, two], 4)) == 2 * len(TokenDataset(one, 4))


def test_pickled_dataset_maps_the_files_again(tmp_path):
    dataset = TokenDataset(small_folder(tmp_path), 4)
    first = dataset[0]["input_ids"]
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy._maps == {}
    assert torch.equal(copy[0]["input_ids"], first)


@hypothesis_settings(deadline=None, max_examples=25)
@given(
    texts=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=20), min_size=1, max_size=12),
    length=st.integers(2, 9),
)
def test_packing_keeps_every_token_but_the_remainder(tmp_path_factory, texts, length):
    folder = tmp_path_factory.mktemp("tokens")
    write_token_files(folder, {"web": texts, "pad": [[1] * 20]}, tokenizer=IDENTITY)
    dataset = TokenDataset(folder, length)
    expected = loop_instances([("web", texts), ("pad", [[1] * 20])], length)
    assert [dataset[i]["input_ids"].tolist() for i in range(len(dataset))] == [
        e[1] for e in expected
    ]


def test_unfinished_file_has_no_name_and_an_aborted_one_leaves_nothing(tmp_path):
    writer = TokenWriter(tmp_path, "web-00000", domain="web", tokenizer=IDENTITY)
    writer.append([1, 2])
    assert not (tmp_path / "web-00000.bin").exists()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_failed_document_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 10\); got \[1, 10\]"):
        write_token_files(tmp_path, {"web": [[1], [1, 10]]}, tokenizer=IDENTITY)
    assert list(tmp_path.iterdir()) == []


def change_manifest(folder, change):
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_truncated_file_is_named(tmp_path):
    path = small_folder(tmp_path) / "web-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"web-00000.bin must have 40 bytes; got 38"):
        TokenDataset(tmp_path, 4)


@pytest.mark.parametrize("suffix", ["bin", "ends"])
def test_changed_file_is_found_when_verified(tmp_path, suffix):
    path = small_folder(tmp_path) / f"web-00000.{suffix}"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))
    TokenDataset(tmp_path, 4)
    with pytest.raises(ValueError, match=f"web-00000.{suffix} does not match the checksum"):
        TokenDataset(tmp_path, 4, verify=True)


@pytest.mark.parametrize("name", ["../web-00000", "/etc/passwd", "a/b", "..", ".hidden", "x\n"])
def test_manifest_cannot_point_outside_its_folder(tmp_path, name):
    small_folder(tmp_path)
    change_manifest(tmp_path, lambda values: values["files"][0].update(name=name))
    with pytest.raises(ValueError, match=r"file names in .* must be letters"):
        TokenDataset(tmp_path, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(format="other"), "format must be"),
        (lambda v: v.pop("tokenizer"), "is not a token manifest"),
        (lambda v: v["files"][0].update(extra=1), "is not a token manifest"),
        (lambda v: v.update(files=[]), "lists no token files"),
        (lambda v: v["files"][0].update(name="gone"), "gone.bin is missing"),
    ],
)
def test_broken_manifest_is_one_clear_line(tmp_path, change, message):
    small_folder(tmp_path)
    change_manifest(tmp_path, change)
    with pytest.raises(ValueError, match=message) as caught:
        TokenDataset(tmp_path, 4)
    assert "\n" not in str(caught.value)


def test_manifest_that_is_not_json_is_refused(tmp_path):
    (small_folder(tmp_path) / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is not a token manifest"):
        TokenDataset(tmp_path, 4)


def test_empty_folder_and_too_long_sequences_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no manifest.json; write token files with"):
        TokenDataset(tmp_path, 4)
    with pytest.raises(ValueError, match="lower sequence_length"):
        TokenDataset(small_folder(tmp_path), 64)
    with pytest.raises(ValueError, match="got an empty list"):
        TokenDataset([], 4)
    with pytest.raises(ValueError, match="sequence_length must be >= 2"):
        TokenDataset(tmp_path, 1)


def test_folders_of_different_tokenizers_are_refused(tmp_path):
    other = TokenizerIdentity("other", vocab_size=11, eos_token_id=EOS)
    one, two = small_folder(tmp_path / "one"), small_folder(tmp_path / "two", other)
    with pytest.raises(ValueError, match=r"must share one tokenizer; got 'tiny' .* and 'other'"):
        TokenDataset([one, two], 4)


def test_one_tokenizer_under_two_names_is_one(tmp_path):
    """A corpus calls its own after its size; data prepare after its folder."""
    named = [TokenizerIdentity(name, 11, EOS, sha256="a" * 64) for name in ("bpe-11", "tokenizer")]
    folders = [small_folder(tmp_path / identity.name, identity) for identity in named]
    assert len(TokenDataset(folders, 4)) == 14
    other = TokenizerIdentity("bpe-11", 11, EOS, sha256="b" * 64)
    with pytest.raises(ValueError, match="must share one tokenizer"):
        TokenDataset([folders[0], small_folder(tmp_path / "other", other)], 4)


@pytest.mark.parametrize("index", [-1, 7])
def test_index_outside_the_dataset_is_an_index_error(tmp_path, index):
    dataset = TokenDataset(small_folder(tmp_path), 4)
    assert len(dataset) == 7
    with pytest.raises(IndexError, match=r"index must be in \[0, 7\)"):
        dataset[index]


def test_batch_of_the_dataset_is_the_order_of_its_epoch(tmp_path):
    dataset = TokenDataset(small_folder(tmp_path), 4)
    order = epoch_order(len(dataset), 3, 0)
    assert np.array_equal(dataset.batch(1, 2, 3), order[2:4])
    assert np.array_equal(dataset.batch(1, 2, 3, rank=1, world_size=2), order[3:4])


def test_the_checksum_of_a_dataset_is_of_its_tokens_and_of_nothing_else(tmp_path):
    def checksum(name, documents, tokenizer=IDENTITY, **source):
        write_token_files(tmp_path / name, documents, tokenizer=tokenizer, source=source)
        return TokenDataset(tmp_path / name, 4).sha256

    same = {"web": [[1, 2, 3], [4, 5]], "code": [[3] * 5]}
    first = checksum("first", same)
    assert first == checksum("moved", same, folder="elsewhere")
    others = [
        {"web": [[1, 2, 3], [4, 6]], "code": [[3] * 5]},
        {"web": [[1, 2, 3, EOS, 4, 5]], "code": [[3] * 5]},  # the same tokens in fewer documents
        {"net": [[1, 2, 3], [4, 5]], "code": [[3] * 5]},
        {"code": [[3] * 5], "web": [[1, 2, 3], [4, 5]]},
    ]
    other_tokenizer = TokenizerIdentity("tiny", 10, EOS, sha256="of another file")
    sums = [checksum(str(number), documents) for number, documents in enumerate(others)]
    assert len({first, *sums, checksum("tokenizer", same, other_tokenizer)}) == 6


def test_an_aborted_file_leaves_nothing_on_a_full_disk(tmp_path, monkeypatch):
    writer = TokenWriter(tmp_path, "a", domain="a", tokenizer=IDENTITY)
    writer.append([1, 2, 3])
    for file in (writer._bin, writer._ends):
        full = Path("/dev/full").open("wb")  # noqa: SIM115 - the writer closes it
        full.write(b"waits in the buffer")
        file._stream.close()
        monkeypatch.setattr(file, "_stream", full)
    with pytest.raises(PathError, match=r"cannot use .*/a\.ends: no space left on device"):
        writer.close()
    writer.abort()
    assert list(tmp_path.iterdir()) == []
