"""Text as tokens come is the text of all tokens, up to the first stop string."""

from hypothesis import given
from hypothesis import strategies as st

from l2r.engines.serve.streamed_text import Text


def read(tokenizer, tokens, stop=()):
    """What was given out after each token; what is held back comes with the last."""
    text, parts = Text(tokenizer, stop), []
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


def test_text_comes_as_soon_as_it_is_certain(small_tokenizer):
    tokens = small_tokenizer("a\u00e9b")["input_ids"]  # the second letter is two tokens
    assert read(small_tokenizer, tokens) == ["a", "", "\u00e9", "b", ""]
    tokens = small_tokenizer("xyxyz")["input_ids"]
    assert read(small_tokenizer, tokens, ["xyz"]) == ["", "", "xy", "", ""]
