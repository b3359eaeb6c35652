"""Text as tokens come is the text of all tokens, up to the first stop string."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2r.engines.serve.answers import ChatAnswer, CompletionAnswer
from l2r.engines.serve.sequence import Sampling, Sequence, StreamedText

UNKNOWN = 10_000  # an id that a model has and its tokenizer has not
# Words with and without a space, special tokens, and characters of two and three bytes.
PIECES = [
    *(["\u2581of"], ["\u2581the"], ["\u2581a"], ["\u2581"], ["of"], ["s"], ["\u00e9"], ["."]),
    *(["<s>"], ["</s>"], [UNKNOWN], ["<0xC3>", "<0xA9>"], ["<0xE4>", "<0xB8>", "<0xAD>"]),
]
pieces = st.lists(st.sampled_from(PIECES), max_size=30).map(lambda parts: list(chain(*parts)))


def read(tokenizer, tokens, stop=(), prompt=()):
    """What was given out after each token; what is held back comes with the last."""
    text, parts = StreamedText(tokenizer, stop, prompt=prompt), []
    for token in tokens:
        parts.append(text.push(token))
        if text.stopped:
            return parts
    return [*parts, text.finish()]


@given(tokens=st.lists(st.integers(0, 299), max_size=40))
def test_any_tokens_give_their_text(small_tokenizer, tokens):
    tokens = [token % len(small_tokenizer) for token in tokens]
    whole = small_tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(read(small_tokenizer, tokens)) == whole


@given(text=st.text(max_size=30), stops=st.lists(st.text(min_size=1, max_size=4), max_size=4))
def test_text_ends_before_the_first_stop_string(small_tokenizer, text, stops):
    tokens = small_tokenizer(text)["input_ids"]
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    assert "".join(read(small_tokenizer, tokens, stops)) == text[: min(places, default=None)]


@pytest.mark.parametrize("stops", [("tal", "pi"), ("pi", "tal"), ("of", "tal", "pi")])
def test_of_several_stop_strings_in_one_token_the_first_in_the_text_ends_it(space_tokenizer, stops):
    tokens = ids(space_tokenizer, ["\u2581capital"])
    assert read(space_tokenizer, tokens, stops, prompt=tokens) == [" ca"]


def test_text_comes_as_soon_as_it_is_certain(small_tokenizer):
    tokens = small_tokenizer("a\u00e9b")["input_ids"]  # the second letter is two tokens
    assert read(small_tokenizer, tokens) == ["a", "", "\u00e9", "b", ""]
    tokens = small_tokenizer("xyxyz")["input_ids"]
    assert read(small_tokenizer, tokens, ["xyz"]) == ["", "", "xy", "", ""]


def ids(tokenizer, tokens):
    vocab = tokenizer.get_vocab()
    return [vocab.get(token, token) for token in tokens]


def whole(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True)


@given(tokens=pieces)
def test_words_keep_their_spaces(space_tokenizer, tokens):
    tokens = ids(space_tokenizer, tokens)
    assert "".join(read(space_tokenizer, tokens)) == whole(space_tokenizer, tokens)


@given(prompt=pieces, tokens=pieces)
def test_text_after_a_prompt_goes_on_from_its_words(space_tokenizer, prompt, tokens):
    # A word before it: the prompt's last tokens alone may have no text.
    prompt = ids(space_tokenizer, [*prompt, "\u2581of", "s"])
    tokens = ids(space_tokenizer, tokens)
    text = whole(space_tokenizer, prompt) + "".join(read(space_tokenizer, tokens, prompt=prompt))
    assert text == whole(space_tokenizer, prompt + tokens)


@given(prompt=st.text(max_size=30), tokens=st.lists(st.integers(0, 299), max_size=20))
def test_text_after_a_prompt_of_bytes_is_its_own(small_tokenizer, prompt, tokens):
    tokens = [token % len(small_tokenizer) for token in tokens]
    prompt = small_tokenizer(prompt)["input_ids"]
    assert "".join(read(small_tokenizer, tokens, prompt=prompt)) == whole(small_tokenizer, tokens)


def test_a_character_of_bytes_after_others_is_whole(space_tokenizer):
    """Wherever the end of the prompt that is read begins."""
    tokens = ids(space_tokenizer, ["<0xC3>", "<0xA9>", "\u2581of"])
    for last in ([], ["<0xC3>", "<0xA9>"], ["<0xC3>", "<0xA9>"] * 2):
        for repeats in range(1, 20):
            characters = [*["<0xE4>", "<0xB8>", "<0xAD>"] * repeats, *last]
            prompt = ids(space_tokenizer, ["\u2581a", *characters])
            assert read(space_tokenizer, tokens, prompt=prompt) == ["", "\u00e9", " of", ""]


def test_a_character_that_the_prompt_begins_is_completed(small_tokenizer):
    *prompt, token = small_tokenizer("a\u00e9")["input_ids"]
    assert read(small_tokenizer, [token], prompt=prompt) == ["\u00e9", ""]


def test_special_tokens_before_the_first_word_are_no_text(space_tokenizer):
    prompt = ids(space_tokenizer, ["\u2581the", *["<s>"] * 10])
    tokens = ids(space_tokenizer, ["\u2581of"])
    assert read(space_tokenizer, tokens, prompt=prompt) == [" of", ""]
    assert read(space_tokenizer, tokens, prompt=prompt[1:]) == ["of", ""]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [(), (" the",)])
def test_an_answer_has_the_space_before_its_first_word(space_tokenizer, echo, stop):
    prompt = ids(space_tokenizer, ["\u2581the", "\u2581capital"])
    steps = []
    sequence = Sequence(
        prompt,
        Sampling(max_tokens=2, temperature=0, echo=echo, stop=stop),
        tokenizer=space_tokenizer,
        ends=frozenset(),
        listener=steps.append,
    )
    if echo:
        sequence.echo(None)
    for token in ids(space_tokenizer, ["\u2581of", "\u2581the"]):
        sequence.step(torch.eye(len(space_tokenizer))[token])
    expected = ["the", " capital"] * echo + [" of", "" if stop else " the"]
    assert [step.text for step in steps] == expected
    assert steps[-1].finish == ("stop" if stop else "length")


words = st.lists(st.sampled_from([piece[0] for piece in PIECES[:8]]), max_size=10)


@given(prompt=words, tokens=words)
def test_the_texts_of_listed_tokens_join_to_the_text(space_tokenizer, prompt, tokens):
    """Each chosen token's, and those of the tokens that might have come in its place."""
    prompt, tokens = (ids(space_tokenizer, [*part, "\u2581the"]) for part in (prompt, tokens))
    steps = []
    sequence = Sequence(
        [space_tokenizer.bos_token_id, *prompt],
        Sampling(max_tokens=len(tokens), temperature=0, echo=True, alternatives=1),
        tokenizer=space_tokenizer,
        ends=frozenset(),
        listener=steps.append,
    )
    one_hot = torch.eye(len(space_tokenizer))
    sequence.echo(one_hot[[*prompt, tokens[0]]])
    for token in tokens:
        sequence.step(one_hot[token])
    text = whole(space_tokenizer, prompt + tokens)
    form = {"model": "served", "tokenizer": space_tokenizer, "logprobs": True}
    completion, chat = (
        kind(**form).whole([steps[1:]], 0)["choices"][0]["logprobs"]
        for kind in (CompletionAnswer, ChatAnswer)
    )
    assert "".join(completion["tokens"]) == text
    assert "".join(next(iter(top)) for top in completion["top_logprobs"]) == text
    assert b"".join(bytes(token["bytes"]) for token in chat["content"]) == text.encode()
    assert "".join(token["top_logprobs"][0]["token"] for token in chat["content"]) == text
