"""Loss on chosen text: against a loop in float64, its errors, its sizes, what is kept."""

import copy
import json
import math
import os

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from scipy import stats
from transformers import OlmoeConfig, OlmoeForCausalLM

from l2r.hf.checkpoints import load_causal_lm
from l2r.hf.checkpoints.placement import Placement
from l2r.stats.intervals import ratio_of_sums
from l2r.text import losses_on_text as text_module
from l2r.text.losses_on_text import (
    Texts,
    TextSettings,
    Windows,
    document_losses,
    evaluate_text,
    read_tokens,
    start_token,
)
from l2r.text.text_loss import ALL_FILES, TextDocument, text_differences, text_losses
from tests.checkpoints import TINY

CONTEXT, STRIDE = 12, 5
TEXTS = [
    "Question: what is the answer? Answer: yes or no",
    "",
    "Q",
    "One <|endoftext|> inside, é and 漢字, and 🎲.",
    "13 dogs jump, 7 foxes run over; " * 2,
]


@pytest.fixture(scope="module")
def small(small_tokenizer):
    torch.manual_seed(3)
    config = OlmoeConfig(**TINY, vocab_size=len(small_tokenizer), max_position_embeddings=64)
    return OlmoeForCausalLM(config).eval()


@pytest.fixture
def files(tmp_path):
    """A folder with one file per text, in the order of their names; the empty one as a line."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "1.txt").unlink()
    (folder / "1.jsonl").write_text(json.dumps({"text": TEXTS[1]}) + "\n")
    return folder


def one_by_one(model, start, ids, context, stride):
    """Nats of a document: every token from its own forward pass, in float64."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # the grouped product knows no float64
    row = [*([] if start is None else [start]), *ids]
    total = 0.0
    for place in range(1, len(row)):
        # the first window that holds it begins at a multiple of the stride
        begin = next(b for b in range(0, len(row), stride) if place < b + context)
        logits = model(torch.tensor([row[begin:place]])).logits[0, -1]
        total -= float(torch.log_softmax(logits, dim=-1)[row[place]])
    return total


@pytest.fixture(scope="module")
def rows(small_tokenizer):
    return [read_tokens(small_tokenizer, text, len(small_tokenizer)) for text in TEXTS]


@torch.no_grad()
@pytest.mark.parametrize("start", [0, None])
def test_losses_equal_a_loop_in_float64(small, rows, start):
    vocab = small.config.vocab_size
    options = {"start": start, "windows": Windows(CONTEXT, STRIDE), "vocab_size": vocab}
    losses = document_losses(small, rows, **options, batch_size=8)
    alone = document_losses(small, rows, **options, batch_size=1)
    assert losses == pytest.approx(alone, rel=1e-6)
    guess = 0.0 if start is not None else math.log(vocab)
    for loss, ids in zip(losses, rows, strict=True):
        expected = one_by_one(small, start, ids.tolist(), CONTEXT, STRIDE)
        expected += guess if len(ids) else 0
        # float32 logits of order 10: 1e-6 of each, over at most some hundred tokens
        assert loss == pytest.approx(expected, rel=1e-5)
    assert losses[1] == 0 and len(rows[2]) == 1 and len(rows[4]) > 3 * CONTEXT


def test_every_token_is_scored_once_with_the_context_that_is_promised():
    for context, stride in ((12, 5), (2, 1), (7, 6), (4, 2)):
        for length in range(1, 40):
            scored = []
            for start, first, end in Windows(context, stride).over(length):
                assert 0 < end - start <= context and start < first
                assert all(
                    place - start >= min(place, context - stride) for place in range(first, end)
                )
                scored += range(first, end)
            assert scored == list(range(1, length))


def test_special_tokens_in_a_text_are_text(small_tokenizer, rows):
    assert small_tokenizer.eos_token_id not in rows[3]
    assert small_tokenizer.decode(rows[3]) == TEXTS[3]


def test_what_comes_before_a_text(small_tokenizer, small):
    class Begins:
        bos_token_id, eos_token_id = 5, 6

        def __call__(self, text, **_):
            return {"input_ids": [5, 9]}

    class Plain(Begins):
        def __call__(self, text, **_):
            return {"input_ids": [9]}

    class Bare(Plain):
        bos_token_id = eos_token_id = None

    assert start_token(small_tokenizer, small.config) == small_tokenizer.eos_token_id == 0
    assert start_token(Begins(), small.config) == 5 and start_token(Plain(), small.config) == 6
    assert start_token(Bare(), OlmoeConfig(eos_token_id=7)) == 7
    for config in (OlmoeConfig(eos_token_id=None), OlmoeConfig(eos_token_id=50304)):
        assert start_token(Bare(), config) is None


def score(checkpoint, paths, tmp_path, *, batch_size=8, **settings):
    texts = Texts(paths, settings.get("limit"))
    settings = TextSettings(**settings)
    options = {"settings": settings, "batch_size": batch_size, "placement": Placement()}
    return evaluate_text(checkpoint, tmp_path / "out", texts, **options)


def test_bits_per_byte_are_all_log_probabilities_by_all_bytes(checkpoint, files, tmp_path):
    scored, written = score(checkpoint, [files], tmp_path, length=CONTEXT, stride=STRIDE)
    model, tokenizer = load_causal_lm(checkpoint)
    with torch.no_grad():
        nats = sum(
            one_by_one(model, 0, read_tokens(tokenizer, text, 300).tolist(), CONTEXT, STRIDE)
            for text in TEXTS
        )
    size = sum(len(text.encode()) for text in TEXTS)
    losses = text_losses(scored)
    names = ["0.txt", "1.jsonl", "2.txt", "3.txt", "4.txt"]
    assert list(losses) == [*(f"texts/{name}" for name in names), ALL_FILES]
    whole = losses[ALL_FILES]
    assert (whole.documents, whole.empty, whole.bytes) == (5, 1, size)
    assert whole.bits_per_byte.value == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert whole.nats_per_token.value == pytest.approx(nats / whole.tokens, rel=1e-5)
    assert whole.perplexity == pytest.approx(math.exp(nats / whole.tokens), rel=1e-4)
    empty = losses["texts/1.jsonl"]
    assert empty.bits_per_byte is None and empty.perplexity is None
    assert math.isnan(losses["texts/2.txt"].bits_per_byte.error)
    record = json.loads(written.read_text())
    assert record["texts"][ALL_FILES]["bits_per_byte"]["value"] == whole.bits_per_byte.value
    assert record["texts"]["texts/2.txt"]["bits_per_byte"]["error"] is None
    assert record["first_token_from"] == "<|endoftext|>"
    assert (record["settings"]["context"], record["settings"]["stride"]) == (CONTEXT, STRIDE)


@pytest.mark.parametrize("count", [2, 5, 40])
def test_errors_are_scipys_over_documents(count):
    rng = np.random.default_rng(0)
    sizes = rng.integers(10, 900, count)
    nats = sizes * rng.normal(1.2, 0.3, count)
    found = ratio_of_sums(nats.tolist(), sizes.tolist())
    value = nats.sum() / sizes.sum()
    error = stats.sem(nats - value * sizes) / sizes.mean()
    assert (found.value, found.error) == pytest.approx((value, error))
    low, high = stats.t.interval(0.95, count - 1, loc=value, scale=error)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-3)
    equal = ratio_of_sums(nats.tolist(), [1] * count)  # equal sizes: the error of a mean
    assert equal.error == pytest.approx(stats.sem(nats))
    with pytest.raises(ValueError, match="sum above 0"):
        ratio_of_sums([0.0], [0])


def documents(nats, *, size=8, ids="x"):
    return [TextDocument("a", str(n), value, 4, size, f"{ids}{n}") for n, value in enumerate(nats)]


def test_differences_are_the_second_less_the_first_by_pairs():
    first, second = documents([8.0, 16.0, 32.0]), documents([9.0, 16.5, 33.5])
    found = text_differences(first, second)["a"]
    pairs = np.array([1.0, 0.5, 1.5]) / math.log(2) / 8
    assert found.bits_per_byte.value == pytest.approx(pairs.mean())
    assert found.bits_per_byte.error == pytest.approx(stats.sem(pairs))
    assert found.nats_per_token.value == pytest.approx(3.0 / 12)
    turned = text_differences(second, first)[ALL_FILES].bits_per_byte
    assert turned.value == -found.bits_per_byte.value and turned.low == -found.bits_per_byte.high
    # what documents have in common says nothing about the difference
    assert found.bits_per_byte.error < text_losses(first)[ALL_FILES].bits_per_byte.error / 10


def test_windows_overlap_by_half_unless_told_otherwise():
    config = OlmoeConfig(max_position_embeddings=256)
    assert TextSettings().windows(config) == Windows(256, 128)
    assert TextSettings(length=9).windows(config) == Windows(9, 4)
    assert TextSettings(length=9, stride=7).windows(config) == Windows(9, 7)
    long = OlmoeConfig(max_position_embeddings=4096)
    assert TextSettings().windows(long) == Windows(2048, 1024)


def test_nats_per_token_of_other_tokens_are_not_compared():
    found = text_differences(documents([8.0, 9.0]), documents([7.0, 7.0], ids="y"))[ALL_FILES]
    assert found.nats_per_token is None and found.bits_per_byte.value < 0
    one = [documents([8.0])[0], documents([8.0, 9.0], ids="y")[1]]  # of two, one is read otherwise
    assert text_differences(documents([8.0, 9.0]), one)[ALL_FILES].nats_per_token is None
    for other in (documents([8.0]), documents([8.0, 9.0], size=9)):
        with pytest.raises(ValueError, match="same documents; got 2 and"):
            text_differences(documents([8.0, 9.0]), other)


def test_lone_surrogates_are_read(tmp_path):
    (tmp_path / "odd.jsonl").write_bytes(b'{"text": "x\\ud800y"}\n')
    assert [text for *_, text in Texts([tmp_path / "odd.jsonl"])] == ["x\ufffdy"]


def test_documents_of_a_file_are_together_and_the_limit_is_of_each_file(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jsonl").write_text('{"text": "text"}\n' * 3)
    (tmp_path / "b.txt").write_text("text")
    parquet.write_table(pyarrow.table({"text": ["text", "more"]}), tmp_path / "c.parquet")
    folder = tmp_path.name
    files = [f"{folder}/a/x.jsonl"] * 3 + [f"{folder}/b.txt"] + [f"{folder}/c.parquet"] * 2
    assert [file for file, _, _ in Texts([tmp_path])] == files
    names = [name for _, name, _ in Texts([tmp_path], 2)]
    assert names == ["a/x.jsonl:1", "a/x.jsonl:2", "b.txt", "c.parquet:1", "c.parquet:2"]
    single = [(file, name) for file, name, _ in Texts([tmp_path / "a" / "x.jsonl"], 1)]
    assert single == [("x.jsonl", "x.jsonl:1")]
    with pytest.raises(ValueError, match="limit must be >= 1; got 0"):
        Texts([tmp_path], 0)


def test_files_of_one_name_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder)
    paths = [tmp_path / "a" / "x.txt", tmp_path / "b" / "x.txt"]
    assert [file for file, _, _ in Texts(paths)] == [str(path) for path in paths]
    assert Texts(paths).digest != Texts(paths[:1]).digest


def test_the_same_words_in_other_documents_are_another_text(tmp_path):
    digests = set()
    for texts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""]):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "a.jsonl").write_text(lines)
        digests.add(Texts([tmp_path / "a.jsonl"]).digest)
    assert len(digests) == 4


def test_a_killed_evaluation_resumes_and_a_finished_one_loads_no_weights(
    checkpoint, files, tmp_path, monkeypatch
):
    monkeypatch.setattr(text_module, "_PART", 60)
    whole, _ = score(checkpoint, [files], tmp_path / "whole")
    seen = []

    def stopped(model, ids, **options):
        if seen:
            raise KeyboardInterrupt
        seen.append(len(ids))
        return document_losses(model, ids, **options)

    monkeypatch.setattr(text_module, "document_losses", stopped)
    with pytest.raises(KeyboardInterrupt):
        score(checkpoint, [files], tmp_path)
    (kept,) = (tmp_path / "out" / "evaluation").glob("*.jsonl")
    assert len(kept.read_text().splitlines()) == 1 + sum(seen)
    kept.write_text(kept.read_text() + "[" * 100_000)  # what a crash, or a stranger, left there
    monkeypatch.setattr(text_module, "document_losses", document_losses)
    resumed, _ = score(checkpoint, [files], tmp_path)
    assert resumed == whole
    monkeypatch.setattr(text_module, "load_pretrained", None)
    assert score(checkpoint, [files], tmp_path)[0] == whole
    with pytest.raises(TypeError):  # other settings are scored again
        score(checkpoint, [files], tmp_path, length=9)
    assert score(checkpoint, [files], tmp_path / "whole")[0] == whole
    os.utime(checkpoint / "model.safetensors")  # and so are weights that were written again
    with pytest.raises(TypeError):
        score(checkpoint, [files], tmp_path / "whole")


def test_two_evaluations_at_once_count_every_document_once(
    checkpoint, files, tmp_path, monkeypatch
):
    """Both append to one file: what is not the next document of the text is scored again."""
    whole, _ = score(checkpoint, [files], tmp_path)
    (kept,) = (tmp_path / "out" / "evaluation").glob("*.jsonl")
    head, *lines = kept.read_text().splitlines()
    twice = [*lines, *lines]
    mixed = [line for line in lines for _ in range(2)]
    for order in (twice, mixed, lines[1:], [*lines[:1], *lines[2:]]):
        kept.write_text("\n".join([head, *order, ""]))
        assert score(checkpoint, [files], tmp_path)[0] == whole
    kept.write_text("\n".join([head, *twice, ""]))
    monkeypatch.setattr(text_module, "load_pretrained", None)
    assert score(checkpoint, [files], tmp_path)[0] == whole


@pytest.mark.parametrize("linked", ["evaluation", "documents"])
def test_nothing_is_written_through_a_link(checkpoint, files, tmp_path, monkeypatch, linked):
    """A stranger's folder may have one to anywhere, before or while documents are scored."""
    home, folder = tmp_path / "home", tmp_path / "out" / "evaluation"
    home.mkdir()
    (home / "letter").write_text("mine\n")
    folder.parent.mkdir()
    if linked == "evaluation":
        folder.symlink_to(home)

    def linking(*given, **options):
        (path,) = folder.glob("*.jsonl")
        path.unlink()
        path.symlink_to(home / "letter")
        return document_losses(*given, **options)

    if linked == "documents":
        monkeypatch.setattr(text_module, "document_losses", linking)
    with pytest.raises(ValueError, match="is a link, and nothing is written through links"):
        score(checkpoint, [files], tmp_path)
    assert list(home.iterdir()) == [home / "letter"]
    assert (home / "letter").read_text() == "mine\n"


def test_progress_ends_with_all_bytes(checkpoint, files, tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "_PART", 60)
    texts, seen = Texts([files]), []
    options = {"settings": TextSettings(), "batch_size": 2, "placement": Placement()}
    report = lambda done, total: seen.append((done, total))  # noqa: E731
    evaluate_text(checkpoint, tmp_path, texts, **options, on_progress=report)
    size = sum(len(text.encode()) for text in TEXTS)
    assert seen[-1] == (size, size) and [done for done, _ in seen] == sorted(d for d, _ in seen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 1}, "length must be >= 2; got 1"),
        ({"length": 8, "stride": 8}, "stride must lie between 1 and 7"),
        ({"stride": 0}, "stride must lie between 1 and 2047"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(checkpoint, files, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        score(checkpoint, [files], tmp_path, **settings)


def test_a_model_that_gives_no_numbers_is_refused(small, rows):
    broken = OlmoeForCausalLM(small.config)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.inf)
    with pytest.raises(ValueError, match="not numbers"):
        document_losses(
            broken, rows, start=0, windows=Windows(8, 4), vocab_size=small.config.vocab_size
        )
    with pytest.raises(ValueError, match="end-of-text must be below vocab_size 9; got 9"):
        document_losses(small, rows, start=9, windows=Windows(8, 4), vocab_size=9)
    with pytest.raises(ValueError, match="batch_size must be >= 1; got 0"):
        document_losses(small, rows, start=0, windows=Windows(8, 4), vocab_size=9, batch_size=0)


def test_a_file_is_read_up_to_the_limit(tmp_path):
    """What comes after it costs no time, and need not even be whole."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\nnot JSON\n')
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n' + '{"text": 5}\n' * 9)
    assert [text for *_, text in Texts([tmp_path], 1)] == ["one", "three"]
    assert Texts([tmp_path], 1).bytes == len("onethree")
