"""``l2r diagnose --text``: a sentence or standard input, of any length, in colors."""

import io
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from l2r.files.arrays import TextRouting
from tests.cli.test_diagnose import SHORT

pytestmark = pytest.mark.usefixtures("coarse")


def records(l2r, checkpoint, tmp_path, *text):
    out = tmp_path / "out"
    code, shown, err = l2r("diagnose", checkpoint, "--text", *text, "--out", out, "--json")
    assert code == 0, err
    assert err.count(str(out / "text.html")) == 1 and (out / "text.html").is_file()
    (tokens,) = json.loads(shown).values()
    assert f"read {len(tokens):,} tokens of the text" in err
    return tokens


def test_a_sentence_and_standard_input_are_routed_alike(l2r, checkpoint, tmp_path, monkeypatch):
    sentence = "the cat sat"
    tokens = records(l2r, checkpoint, tmp_path, sentence)
    assert "".join(token["token"] for token in tokens).strip() == sentence
    for token in tokens:
        assert len({len(layer) for layer in token["experts"]}) == 1
        for weights in token["weights"]:
            assert weights == sorted(weights, reverse=True)
    monkeypatch.setattr("sys.stdin", io.StringIO(sentence))
    assert records(l2r, checkpoint, tmp_path, "-") == tokens


def test_one_token_and_more_than_the_context_are_routed(l2r, checkpoint, tmp_path):
    (one,) = records(l2r, checkpoint, tmp_path, "a")
    assert one["token"].strip() == "a"
    from transformers import AutoConfig

    context = AutoConfig.from_pretrained(checkpoint).max_position_embeddings
    tokens = records(l2r, checkpoint, tmp_path, "a b c d e f g " * context)
    assert len(tokens) > context
    text = "".join(token["token"] for token in tokens)
    assert text.startswith("a b c d") and text.count("g") == context


@pytest.mark.slow("two diagnoses")
def test_the_choices_are_those_of_a_diagnosis_of_the_same_tokens(l2r, checkpoint, tmp_path):
    """A row of 16 tokens of a diagnosis, read again as a text of one's own."""
    (tmp_path / "data").mkdir()
    sentence = "the cat sat on the mat and the dog sat on the cat " * 4
    (tmp_path / "data" / "one.txt").write_text(sentence)
    data = ("--data", tmp_path / "data" / "one.txt", "--text-tokens", 16)
    code, _, err = l2r("diagnose", checkpoint, *data, *SHORT, "--out", tmp_path / "whole")
    assert code == 0, err
    (found,) = (tmp_path / "whole").glob("*/text.npz")
    whole = TextRouting.read(found)
    tokens = records(l2r, checkpoint, tmp_path, sentence)
    pieces = [str(whole.pieces[token]) for token in whole.tokens[whole.shown[0]]]
    own = [token["token"] for token in tokens[: len(pieces)]]
    if own == pieces:  # nothing was put before the text
        first = [token["experts"][0][0] for token in tokens[: len(pieces)]]
        assert first == whole.experts[0, 0, :, 0].tolist()
    else:
        pytest.fail(f"other tokens: {own} and {pieces}")


@pytest.mark.parametrize("text", ["", "1024", "-5"])
def test_nothing_and_a_number_are_refused(l2r, checkpoint, tmp_path, text):
    command = ("diagnose", checkpoint, f"--text={text}", "--out", tmp_path / "out")
    assert "--text" in l2r(*command).refusal()


def test_a_string_is_read_in_place_of_files(l2r, checkpoint, tmp_path, monkeypatch):
    """By check, mismatch and eval: the same words, and what a file of it gives."""
    monkeypatch.chdir(tmp_path)
    sentence = "the cat sat on the mat and the dog sat on the cat"
    (tmp_path / "text").write_text(sentence)
    losses = {}
    for option, value in (("--text", sentence), ("--data", "text")):
        code, out, err = l2r("eval", checkpoint, option, value, "--out", option, "--json")
        assert code == 0, err
        losses[option] = [row["nats/token"] for row in json.loads(out)]
    assert losses["--text"] == losses["--data"]
    against = ("mismatch", checkpoint, "--text", sentence, "--against", "bf16")
    code, out, err = l2r(*against, "--out", "changed", "--json")
    assert code == 0, err
    tokens = len(AutoTokenizer.from_pretrained(checkpoint)(sentence)["input_ids"])
    assert json.loads(out)["tokens"] == tokens
    code, out, err = l2r("check", checkpoint, "--text", sentence)
    assert code in (0, 1) and "different tokens" in out, err


def test_a_model_continues_the_text_in_its_own_words(l2r, checkpoint, tmp_path):
    """The tokens are those of ``generate`` alone; each has its experts, and a mark."""
    tokens = records(l2r, checkpoint, tmp_path, "the cat sat", "--generate", "6")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("the cat sat", return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)[0]
    assert [token["token"] for token in tokens] == [tokenizer.decode([i]) for i in alone]
    assert [token["written"] for token in tokens] == [n >= ids.shape[1] for n in range(len(alone))]
    page = (tmp_path / "out" / "text.html").read_text()
    assert len(alone) > ids.shape[1] and f'"written":{ids.shape[1]},' in page.replace(": ", ":")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--generate", "4"), "generate goes with --text"),
        (("--text", "the cat", "--generate", "100000"), "generate must be at most"),
        (("--text", "the cat", "--generate", "-1"), "--generate"),
    ],
)
def test_what_cannot_be_written_is_refused(l2r, checkpoint, tmp_path, options, words):
    assert words in l2r("diagnose", checkpoint, *options, "--out", tmp_path / "out").refusal()
    assert not (tmp_path / "out").exists()
