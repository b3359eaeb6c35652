"""Near copies go, whatever their order; text that shares a sentence stays."""

import random

import pytest

from l2r.text.sources import embedded_sources
from l2r.text.split import without_near_copies


def words(seed, count):
    generator = random.Random(seed)
    return [f"word{generator.randrange(10_000)}" for _ in range(count)]


def changed(text, every):
    """The text with every so many-th word replaced."""
    return [f"new{i}" if i % every == 0 else word for i, word in enumerate(text)]


LONG = words(0, 400)
FILES = {
    "copy": changed(LONG, 40)[:390],  # 27 of 40 runs of 13 words are as they were
    "long": LONG,
    "other": words(1, 300),
    "quotes": [*words(2, 300), *LONG[:14]],  # 2 of its 302
    "short": words(3, 5),
}


@pytest.mark.parametrize("order", [list(FILES), list(reversed(FILES))])
def test_the_smaller_of_two_near_copies_goes_and_the_order_stays(order):
    kept = without_near_copies((name, " ".join(FILES[name])) for name in order)
    assert [name for name, _ in kept] == [name for name in order if name != "copy"]


@pytest.mark.parametrize(("limit", "stays"), [(0.007, True), (0.006, False)])
def test_the_limit_is_a_share_of_the_smaller_file(limit, stays):
    files = [(name, " ".join(FILES[name])) for name in ("long", "quotes")]
    assert (files[1] in without_near_copies(iter(files), limit)) is stays


def test_embedded_text_has_near_copies_in_version_1_only(monkeypatch):
    files = [(name, " ".join(text)) for name, text in FILES.items()]
    files.append(("encodings/latin.py", "table " * 50))
    monkeypatch.setattr("l2r.text.sources._code", lambda: iter(files))
    first, second = ([n for n, _ in embedded_sources(v)["code"]()] for v in (1, 2))
    assert first == [name for name, _ in files]
    assert second == ["long", "other", "quotes", "short"]
