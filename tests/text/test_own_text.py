"""Text of one's own: every kind of file is read alike, and what is wrong names file and line."""

import pyarrow
import pytest
from pyarrow import parquet

from l2r.analysis import inputs
from l2r.text.corpus import CorpusOptions, build_corpus
from l2r.text.held_out import split_files
from l2r.text.manifest import read_manifest
from l2r.text.shards import open_shard, read_numbered
from l2r.text.sources import domain_files, folder_files, text_documents
from l2r.text.tokenizer import load_tokenizer
from l2r.text.tokens import read_documents
from l2r_lab.training.data.listing import folder_listing
from l2r_lab.training.data.prepare import prepare_tokens, shard_tasks

ENDINGS = (".txt", ".jsonl", ".jsonl.gz", ".json.gz", ".json.zst", ".parquet")


def write(write_shard, folder, ending, texts):
    """The texts as files of one kind: a .txt for each, else one file."""
    folder.mkdir(parents=True, exist_ok=True)
    if ending == ".txt":
        for number, text in enumerate(texts):
            (folder / f"{number:03}.txt").write_text(text)
    else:
        write_shard(folder / f"all{ending}", texts)


@pytest.mark.parametrize("ending", ENDINGS)
def test_documents_have_the_name_of_their_file_and_their_line(
    ending, write_shard, documents, tmp_path
):
    texts = documents(0, 3)
    write(write_shard, tmp_path / "a", ending, texts)
    names = [f"{i:03}.txt" for i in range(3)] if ending == ".txt" else [
        f"all{ending}:{line}" for line in (1, 2, 3)
    ]  # fmt: skip
    assert list(text_documents(tmp_path / "a")) == list(zip(names, texts, strict=True))
    of_folder = [(f"a/{name}", text) for name, text in zip(names, texts, strict=True)]
    assert list(text_documents(tmp_path)) == of_folder
    file = tmp_path / "a" / names[0].partition(":")[0]
    assert next(text_documents(file)) == (names[0], texts[0])


@pytest.mark.parametrize("ending", ENDINGS)
def test_train_prepare_and_diagnose_take_every_kind_alike(
    ending, write_shard, documents, tokenizer_file, tmp_path
):
    for seed, domain in enumerate(("one", "two")):
        write(write_shard, tmp_path / "text" / domain, ending, documents(seed, 40))
    wanted = {domain: set(documents(seed, 40)) for seed, domain in enumerate(("one", "two"))}

    corpus = build_corpus(CorpusOptions(str(tmp_path / "text"), 300), cache=tmp_path / "cache")
    counts = {d: n for d, (n, _) in read_manifest(corpus.train).by_domain().items()}
    held = {d: n for d, (n, _) in read_manifest(corpus.validation).by_domain().items()}
    assert {d: counts[d] + held[d] for d in counts} == {"one": 40, "two": 40}

    listing = folder_listing(tmp_path / "text")
    tasks = shard_tasks(listing, f"{tmp_path}/text/")
    assert len(tasks) == 2  # small files are not cut into rows one by one
    prepare_tokens(tasks, tmp_path / "tokens", tokenizer=tokenizer_file)
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(tokenizer_file)).decode
    found: dict[str, set[str]] = {"one": set(), "two": set()}
    for domain, ids in read_documents(tmp_path / "tokens"):
        found[domain].add(decode(ids[:-1].tolist()))
    assert found == wanted

    letters = type("Letters", (), {
        "eos_token_id": None,
        "__call__": lambda self, text, **_: {"input_ids": [min(ord(c), 199) for c in text]},
    })()  # fmt: skip
    _, domain, domains = inputs.open_text(
        str(tmp_path / "text"), letters, vocab_size=200, instances=4, length=9, report=print
    )
    assert domains == ("one", "two") and domain.tolist() == [0, 0, 1, 1]


def test_files_beside_each_other_are_one_domain_and_may_be_of_several_kinds(
    write_shard, documents, tmp_path
):
    write(write_shard, tmp_path, ".txt", documents(0, 2))
    write(write_shard, tmp_path, ".jsonl", documents(1, 2))
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    (tmp_path / ".hidden.txt").write_text("no")
    assert folder_listing(tmp_path) == {"text": ["*.txt", "all.jsonl"]}
    assert {text for _, text in text_documents(tmp_path)} == {*documents(0, 2), *documents(1, 2)}


@pytest.mark.parametrize("layer", ["", "data/"])
def test_text_beside_sub_folders_with_text_is_named_and_not_left_out(layer, tmp_path):
    (tmp_path / layer / "letters").mkdir(parents=True)
    (tmp_path / layer / "letters" / "1.txt").write_text("text of a domain")
    for name in ("facts.json", ".hidden.txt", "README.md"):  # of the hub, and no text
        (tmp_path / layer / name).write_text("{}")
    assert folder_listing(tmp_path) == {"letters": [f"{layer}letters/*.txt"]}
    for number in range(5):
        (tmp_path / layer / f"{number}.txt").write_text("text of none")
    with pytest.raises(ValueError, match=r"to no domain: 0\.txt, 1\.txt, 2\.txt and 2 more"):
        folder_listing(tmp_path)


ENCODED = {
    "utf-16": ("caf\u00e9".encode("utf-16"), "byte 0xff at 0. If it is utf-16: iconv -f utf-16"),
    "utf-16 without a mark": ("cafe".encode("utf-16-le"), "a zero byte at 1. If it is utf-16: "),
    "latin1": (b"caf\xe9 bar", "byte 0xe9 at 3. If it is latin1: iconv -f latin1 -t utf-8"),
}


@pytest.mark.parametrize("name", ["b.txt", "b.md"])
@pytest.mark.parametrize("encoding", ENCODED)
def test_text_that_is_not_utf8_is_named_with_its_remedy(encoding, name, tmp_path):
    """U+FFFD in its place would be learned and scored without a word."""
    data, message = ENCODED[encoding]
    (tmp_path / "a.txt").write_text("plain caf\u00e9", encoding="utf-8")
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"data .*{name} must be UTF-8; it has {message}"):
        list(text_documents(tmp_path / name))
    if name == "b.txt":  # two files of one shard: the file is named, not the shard
        stream = open_shard(str(tmp_path / "*.txt"))
        with pytest.raises(ValueError, match=f"data .*b.txt must be UTF-8; it has {message}"):
            list(read_numbered(stream, str(tmp_path / "*.txt")))


def test_version_1_reads_text_files_only(write_shard, documents, tmp_path):
    write(write_shard, tmp_path, ".txt", documents(0, 20))
    first = build_corpus(CorpusOptions(str(tmp_path), 300, version=1), cache=tmp_path / "cache")
    write(write_shard, tmp_path, ".jsonl", documents(1, 20))
    again = build_corpus(CorpusOptions(str(tmp_path), 300, version=1), cache=tmp_path / "cache")
    assert first == again


def test_changed_shards_are_another_corpus(write_shard, documents, tmp_path):
    found = set()
    for seed in (0, 1):
        write(write_shard, tmp_path / "text", ".jsonl", documents(seed, 20 + seed))
        options = CorpusOptions(str(tmp_path / "text"), 300)
        found.add(build_corpus(options, cache=tmp_path / "cache").train)
    assert len(found) == 2


FIRST = b'{"text": "x"}\n'
CORRUPT = "truncated or corrupt after document"
BROKEN = [
    ("a.jsonl", FIRST + b'\n{"body": 1, "i": 1}\n', "line 3: no field 'text'; it has 'body', 'i'"),
    ("a.jsonl", FIRST + b'{"text": 5}\n', "line 2: field 'text' must be a string; got int"),
    ("a.jsonl", FIRST + b"[1]\n", "line 2: it must be a JSON object; got list"),
    ("a.jsonl", FIRST + b'{"text": \n', f"{CORRUPT} 1: line 2: "),
    ("a.jsonl", b'{"text": ' + b"[" * 100_000, f"{CORRUPT} 0: line 1: "),
    ("a.jsonl", b"", "holds no documents"),
    ("a.json.gz", b"no gzip", f"{CORRUPT} 0: "),
]


@pytest.mark.parametrize(("name", "data", "message"), BROKEN)
def test_what_is_broken_names_file_and_line(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(ValueError, match=f"{tmp_path / name}.*{message}") as error:
            list(text_documents(path))
        assert "\n" not in str(error.value)


def test_a_table_without_text_names_its_columns(tmp_path):
    parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: no column 'text'; it has body, id"):
        list(text_documents(tmp_path / "a.parquet"))


def test_missing_and_empty_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=f"data must be a file or a folder; got {tmp_path}/no"):
        list(text_documents(tmp_path / "no"))
    with pytest.raises(ValueError, match=f"{tmp_path} must hold text files, ending in .txt "):
        list(text_documents(tmp_path))


def test_linked_folders_are_read_hidden_ones_are_not_and_circles_end(tmp_path):
    """The same files count as read and as what a cached corpus is of."""
    text, elsewhere = tmp_path / "text", tmp_path / "elsewhere" / "deep"
    for place in (text / "own", text / ".hidden", text / "own" / ".checkpoints", elsewhere):
        place.mkdir(parents=True)
        (place / "a.txt").write_text(str(place))
    (text / "books").symlink_to(elsewhere.parent)
    (elsewhere / "circle").symlink_to(elsewhere.parent)
    names = ["books/deep/a.txt", "own/a.txt"]
    assert [name for name, _ in text_documents(text)] == names
    assert folder_files(text) == [text / name for name in names]
    assert {n: len(files) for n, (_, files) in domain_files(text).items()} == {"books": 1, "own": 1}


def test_a_single_file_may_have_any_ending(tmp_path):
    (tmp_path / "notes.md").write_text("plain text")
    assert list(text_documents(tmp_path / "notes.md")) == [("notes.md", "plain text")]


def test_empty_files_do_not_stop_the_others(documents, tokenizer_file, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    texts = ["", *documents(0, 5), ""]
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    assert [text for _, text in text_documents(folder)] == texts
    train, held = split_files(text_documents(folder), 10**6)
    assert sorted(text for _, text in train + held) == sorted(documents(0, 5))
    tasks = shard_tasks(folder_listing(folder), f"{folder}/")
    manifests = prepare_tokens(tasks, tmp_path / "tokens", tokenizer=tokenizer_file)
    assert manifests["train"].files[0].documents == 5


def test_tokens_of_files_that_changed_are_refused(write_shard, documents, tokenizer_file, tmp_path):
    """Else more text in the folder would be left out in silence."""
    write(write_shard, tmp_path / "text", ".txt", documents(0, 3))

    def run():
        tasks = shard_tasks(folder_listing(tmp_path / "text"), f"{tmp_path}/text/")
        return prepare_tokens(tasks, tmp_path / "tokens", tokenizer=tokenizer_file)

    assert run()["train"].files == run()["train"].files
    (tmp_path / "text" / "more.txt").write_text("one more")
    with pytest.raises(ValueError, match=r"\*.txt has changed since .* to another folder"):
        run()


def test_a_tokenizer_of_ones_own_is_made_of_training_text(l2r, tmp_path):
    """A word of the held-out text alone would be a token if it were read."""
    folder, out = tmp_path / "text", tmp_path / "bpe"
    folder.mkdir()
    for word in ("ebony", "ivory", "zinnia", "quartz", "umbra", "yonder"):
        (folder / f"{word}.txt").write_text(f"{word} " * 40)
    made = l2r("data", "tokenizer", "--data", folder, "--out", out, "--vocab-size", 400)
    tokenizer, identity = load_tokenizer(out)
    size = identity.vocab_size
    assert (made.code, made.out) == (
        0, f"{out}: {size} tokens; use it with l2r data prepare --tokenizer {out}\n"
    )  # fmt: skip
    assert 280 < size == tokenizer.get_vocab_size() and identity.eos_token_id == 0
    tokens = {tokenizer.decode([i]).strip() for i in range(size)}
    train, held = split_files(text_documents(folder), 4_000_000)
    words = [{text.split()[0] for _, text in part} for part in (train, held)]
    assert words[0] <= tokens and not words[1] & tokens
    again = l2r("data", "tokenizer", "--data", folder, "--out", out)
    assert again.refusal() == f"error: --out must be a new folder; got {out}"
    small = l2r("data", "tokenizer", "--data", folder, "--out", tmp_path / "b", "--vocab-size", 299)
    assert small.refusal() == "error: --vocab-size must be >= 300; got 299"
    assert not (tmp_path / "b").exists()


NAMES = ("Bücher", "B cher", "my books", "書", "plain-name", "2.0")


@pytest.fixture
def named_folders(documents, tmp_path):
    """A folder of text per name, and a hidden one, which is no domain."""
    for number, name in enumerate((*NAMES, ".notes")):
        (tmp_path / "text" / name).mkdir(parents=True)
        for seed in range(6):
            text = documents(10 * number + seed, 1)[0]
            (tmp_path / "text" / name / f"{seed}.txt").write_text(text)
    return tmp_path / "text"


@pytest.mark.parametrize("version", [1, 2])
def test_a_domain_has_any_name_and_its_files_a_plain_one(named_folders, tmp_path, version):
    options = CorpusOptions(str(named_folders), 300, version=version)
    corpus = build_corpus(options, cache=tmp_path / "cache")
    for part in (corpus.train, corpus.validation):
        files = {file.domain: file.name for file in read_manifest(part).files}
        assert sorted(files) == sorted(NAMES) and len(set(files.values())) == len(NAMES)
        assert all(name.isascii() and (part / f"{name}.bin").is_file() for name in files.values())
        assert files["plain-name"] == "plain-name-00000" and files["2.0"] == "2.0-00000"
    assert {domain for domain, _ in read_documents(corpus.train)} == set(NAMES)


def test_domains_of_any_name_are_prepared_and_resumed(named_folders, tokenizer_file, tmp_path):
    out = tmp_path / "tokens"
    listing = folder_listing(named_folders)
    tasks = shard_tasks(listing, f"{named_folders}/")
    manifest = prepare_tokens(tasks, out, tokenizer=tokenizer_file)["train"]
    assert {file.domain for file in manifest.files} == set(NAMES)
    names = {file.domain: file.name for file in manifest.files}
    assert len(set(names.values())) == len(NAMES) and names["plain-name"] == "plain-name-00000"
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert prepare_tokens(tasks, out, tokenizer=tokenizer_file)["train"] == manifest
    assert {path: path.stat().st_mtime_ns for path in out.glob("*.bin")} == before
    # nor does a name depend on the other domains
    one = shard_tasks({"Bücher": listing["Bücher"]}, f"{named_folders}/")
    assert [task.name for task in one] == [names["Bücher"]]
