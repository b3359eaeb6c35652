"""What a folder may hold: limits on both sides of each border."""

import json
import re

import pytest
import yaml

from l2r.files import reading
from l2r.files.reading import MAX_DEPTH, MAX_VALUES, parse_json, parse_yaml, read_json, read_yaml


def nested(levels, opened="[", closed="]"):
    return (opened * levels + closed * levels).encode()


def test_json_and_yaml_are_read_as_their_libraries_read_them():
    value = {"a": [1, -2.5, "é \\ [ {", None, True, {"b": []}], "c": 10**30}
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json("﻿{}".encode()) == {}
    text = "a: [1, 2.5, x, null, {b: []}]\nwhen: 2020-01-01\nbase: &x {k: 1}\nother: *x\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "'a' twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' twice"),
        (b'{"a": NaN}', "must be finite; got NaN"),
        (b'{"a": -Infinity}', "must be finite; got -Infinity"),
        (b'{"a": 1e999}', "must be finite; got 1e999"),
    ],
)
def test_what_json_has_no_meaning_for_is_refused_where_it_matters(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_json(text)
    assert parse_json(text, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_levels_are_counted_and_brackets_in_words_are_not(strict):
    assert parse_json(nested(MAX_DEPTH), list, strict=strict)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} levels"):
        parse_json(nested(MAX_DEPTH + 1), list, strict=strict)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} levels"):
        parse_json(nested(MAX_DEPTH + 1, '{"a":', "}").replace(b":}", b":0}"), strict=strict)
    words = {"a": "[{" * 500, '"[': '\\"[[', "b": [[]] * 500}
    assert parse_json(json.dumps(words).encode(), strict=strict) == words


@pytest.mark.parametrize("text", [b"[1]", b"5", b'"a"', b"null"])
def test_another_type_is_named(text):
    with pytest.raises(ValueError, match="it must be a JSON object; got"):
        parse_json(text)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="is not a readable JSON object: it is not UTF-8"):
        read_json(tmp_path / "a.json")


def test_a_large_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_BYTES", 10)
    (tmp_path / "a.json").write_text('{"a": 12}')
    (tmp_path / "b.json").write_text('{"a": 1234}')
    assert read_json(tmp_path / "a.json") == {"a": 12}
    with pytest.raises(ValueError, match=r"b.json .* at most 10 bytes"):
        read_json(tmp_path / "b.json")


def test_yaml_is_nested_as_deep_as_json():
    assert parse_yaml(nested(MAX_DEPTH))
    for levels in (MAX_DEPTH + 1, 5000):
        with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} levels"):
            parse_yaml(nested(levels))


def test_levels_add_up_through_aliases():
    half = MAX_DEPTH // 2
    inner, outer = "[" * half + "]" * half, "[" * half + "*a" + "]" * half
    assert parse_yaml(f"- &a {inner}\n- [*a]\n")
    with pytest.raises(ValueError, match="levels deep"):
        parse_yaml(f"- &a {inner}\n- {outer}\n")


def test_aliases_count_as_what_they_stand_for():
    """The list and its words are 1 + n values, k aliases of it k times that."""
    words = 999
    fits = MAX_VALUES // (words + 1) - 1
    start = f"- &a [{', '.join(['x'] * words)}]\n"
    assert len(parse_yaml(start + "- *a\n" * (fits - 1))) == fits
    with pytest.raises(ValueError, match=f"more than {MAX_VALUES:,} values"):
        parse_yaml(start + "- *a\n" * (fits + 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "an alias inside what the alias stands for"),
        ("a: &a {b: {c: *a}}", "an alias inside what the alias stands for"),
        ("a: 1\nb: 2\na: 3\n", "'a' twice"),
        ("a: {b: 1, b: 2}", "'b' twice"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: 2020-99-99", "month must be in 1..12"),
        ("a: [", "while parsing a flow node"),
    ],
)
def test_what_yaml_must_not_hold_is_named_in_one_line(text, message, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"a.yaml is not valid YAML: ") as error:
        read_yaml(tmp_path / "a.yaml")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_names_by_the_million_are_compared_once():
    """Two of them alike are found without comparing each with each: that would take hours."""
    names = ",".join(f'"{n}":0' for n in [*range(100_000), 7])
    with pytest.raises(ValueError, match="'7' twice"):
        parse_json(b"{" + names.encode() + b"}")


@pytest.mark.parametrize("part", [b"[]", b"{}", b'{"a": [1]}'])
def test_many_small_parts_are_refused_before_they_are_made(part, monkeypatch):
    """An empty list is 3 bytes of text and 64 of memory."""
    monkeypatch.setattr("l2r.files.reading.MAX_PARTS", 100)
    text = b'{"a": [' + b", ".join([part] * 101) + b"]}"
    with pytest.raises(ValueError, match="more than 100 lists and objects"):
        parse_json(text)
    few = b'{"a": [' + b", ".join([part] * 40) + b"]}"
    assert len(parse_json(few)["a"]) == 40
