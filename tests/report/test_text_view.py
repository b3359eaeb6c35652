"""The data of the text page are those that were measured, and its size stays small."""

import base64
import dataclasses
import json
import re

import numpy as np
import pytest

from l2r.files.arrays import TextRouting
from l2r.report.text_findings import agreement, finding, headline
from l2r.report.text_view import page_data, text_sections, write_text_page
from tests.report.texts import WORDS, random_text


def decoded(text, kind):
    return np.frombuffer(base64.b64decode(text), dtype=kind)


def data_of(page):
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page)
    return json.loads(text)


@pytest.mark.parametrize("experts", [6, 300])
def test_every_number_survives_the_way_into_the_page(tmp_path, experts):
    text = random_text(experts=experts)
    text.radius[1, 2, 3] = np.nan
    text.save(tmp_path / "text.npz")
    saved = TextRouting.read(tmp_path / "text.npz")
    page = write_text_page({"one": saved}, tmp_path / "page.html").read_text()
    (checkpoint,) = data_of(page)["checkpoints"]
    assert checkpoint["experts"] == experts
    assert [layer["chosen"] for layer in checkpoint["layers"]] == [2] * len(checkpoint["layers"])
    for number, layer in enumerate(checkpoint["layers"]):
        chosen = decoded(layer["experts"], "u1" if experts == 6 else "<u2")
        assert np.array_equal(chosen, text.experts[number].ravel())
        for name in ("margin", "entropy", "radius", "context_weights"):
            kept = decoded(layer[name], "<f4")
            assert np.array_equal(kept, getattr(text, name)[number].ravel(), equal_nan=True)
        for name in ("contexts", "vocabulary", "vocabulary_counts"):
            assert np.array_equal(decoded(layer[name], "<i4"), getattr(text, name)[number].ravel())
        weights = decoded(layer["weights"], "<u2") / 65535 * layer["largest"]
        # Half a step, and a rounding of fp32 where the steps are counted.
        allowed = layer["largest"] * (0.5 / 65535 + np.finfo(np.float32).eps)
        assert np.abs(weights - text.weights[number].ravel()).max() <= allowed
    assert np.array_equal(decoded(data_of(page)["texts"][0]["tokens"], "<u4"), text.tokens.ravel())


def test_one_text_is_stored_once_and_another_apart():
    other_words = np.array([w.upper() for w in WORDS])
    data = page_data(
        {
            "one": random_text(),
            "two": random_text(layers=3, experts=9, seed=1),
            "three": random_text(pieces=other_words),
        }
    )
    assert [checkpoint["text"] for checkpoint in data["checkpoints"]] == [0, 0, 1]
    assert [text["pieces"][0] for text in data["texts"]] == [" word0", " WORD0"]


def test_no_text_can_leave_the_element_it_stands_in(tmp_path):
    evil = "</script><script>alert(1)</script>/*SCRIPT*/<!--"
    pieces = np.array([evil, *WORDS])
    name = "<u>/*DATA*/"
    page = write_text_page({name: random_text(pieces=pieces)}, tmp_path / "p.html").read_text()
    assert data_of(page)["texts"][0]["pieces"][0] == evil
    assert data_of(page)["checkpoints"][0]["name"] == name
    assert page.count("<script") == 2 and "<u>" not in page


def test_two_large_checkpoints_take_at_most_12_mb(tmp_path):
    size = {"layers": 16, "experts": 64, "chosen": 8, "rows": 16, "length": 250, "columns": 250}
    page = write_text_page(
        {"one": random_text(**size), "two": random_text(**size, seed=1)}, tmp_path / "page.html"
    )
    assert page.stat().st_size <= 12e6


def test_the_section_leads_to_the_page_beside_it(tmp_path):
    assert text_sections({}, tmp_path / "report.html") == []
    (section,) = text_sections({"one": random_text()}, tmp_path / "report.html")
    assert (tmp_path / section.parts[0].href).is_file()
    many = {f"run{n}": random_text() for n in range(9)}
    (section,) = text_sections(many, tmp_path / "report.html")
    assert "(the first 8 of 9)" in section.text
    page = (tmp_path / section.parts[0].href).read_text()
    assert len(data_of(page)["checkpoints"]) == 8


def test_a_wrong_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot read text routing from"):
        TextRouting.read(tmp_path / "none.npz")
    np.savez(tmp_path / "other.npz", tokens=np.zeros(3))
    with pytest.raises(ValueError, match="holds no text routing: context_weights, contexts"):
        TextRouting.read(tmp_path / "other.npz")
    random_text().save(tmp_path / "cut.npz")
    content = (tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="cannot read text routing from"):
        TextRouting.read(tmp_path / "cut.npz")


def test_another_checkpoint_has_the_colors_of_the_best_matching():
    """The same model with its experts renumbered: each has its partner's color, all agree."""
    base = random_text()
    renumber = np.array([3, 0, 5, 1, 4, 2])
    other = dataclasses.replace(base, experts=renumber[base.experts].astype(np.int16))
    data = page_data({"base": base, "other": other})
    for layer in data["checkpoints"][0]["layers"]:
        assert layer["colors"] == list(range(6))
    for layer in data["checkpoints"][1]["layers"]:
        assert layer["colors"] == renumber.argsort().tolist()
    share, chance = agreement(base, other)
    assert share == 1 and 1 / 6 < chance < 0.5
    assert "other sends 100% of the tokens to the experts that match base's" in data["headline"]
    assert f"({100 * chance:.0f}% by chance)" in data["headline"]


@pytest.mark.parametrize("experts", [4, 9])
def test_experts_without_a_partner_have_a_color_of_their_own(experts):
    base, other = random_text(), random_text(experts=experts, seed=1)
    for layer in page_data({"base": base, "other": other})["checkpoints"][1]["layers"]:
        assert len(set(layer["colors"])) == experts
        assert max(layer["colors"]) < max(experts, 6)


def test_a_layer_is_told_in_a_sentence():
    text = random_text(rows=1, length=5, columns=5)
    text.experts[0, 0, :, 0] = [2, 2, 0, 2, 5]
    assert finding(text, 0) == "3 of 5 tokens go first to expert 2; 3 of 6 experts get none."
    text.experts[1, 0, :, 0] = 4
    assert headline({"mine": text}) == (
        "mine sends 5 of 5 tokens first to expert 4 in its most crowded layer, 1; "
        "5 of its 6 experts get none."
    )
