"""The table of coefficients: its batch, its equations, and the page."""

import dataclasses

import pytest
import torch

from scripts.others.coefficients import __main__ as page
from scripts.others.coefficients import references
from scripts.others.coefficients.batch import (
    LAYERS,
    TOP_K,
    as_weights,
    batch_logits,
    logits_of,
    padding_mask,
)
from scripts.others.coefficients.measure import FACTORS, ROOM, difference, effect, measure, read
from scripts.others.coefficients.ours import ours
from scripts.others.coefficients.stock import own_losses
from scripts.pages.marks import section_of

OURS = {
    "paper": (references.switch, {}),
    "olmoe": (references.over_k, {"balance_variant": "olmoe"}),
    "hf": (references.pooled, {"balance_variant": "hf"}),
    "tutel": (references.gshard, {"balance_variant": "tutel"}),
    "step": (references.switch, {"balance_scope": "step"}),
    "sequence": (references.sequence, {"balance_scope": "sequence"}),
}


def test_the_weights_give_the_logits_to_the_bit():
    logits = batch_logits()
    assert torch.equal(logits_of(*as_weights(logits)), logits)


@pytest.mark.parametrize("top_k", [1, TOP_K])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_ours_is_the_equation_in_float64(name, padded, top_k):
    reference, settings = OURS[name]
    logits, mask = batch_logits(), padding_mask() if padded else None
    x, weights = as_weights(logits)
    found = ours(x, weights, top_k, mask, balance=0.01, **settings)
    value = 0.01 * float(reference(logits.double(), top_k, mask))
    assert abs(found.value / value - 1) < ROOM
    exact = 0.01 * references.gradient(reference, logits, top_k, mask)
    assert difference(found.gradient, as_weights(exact)[1]) < ROOM


def test_a_converted_coefficient_trains_the_same():
    """In Trainer: OLMoE's loss over k, of ours by default."""
    loss = next(each for each in own_losses() if each.factor == "1 / k")
    assert effect(loss) < ROOM
    assert effect(dataclasses.replace(loss, factor="1")) > 0.1


def test_a_wrong_factor_or_equation_is_noticed():
    loss = own_losses()[0]
    for wrong in ({"factor": "L"}, {"reference": references.pooled}):
        with pytest.raises(AssertionError):
            measure(dataclasses.replace(loss, **wrong))


def test_the_page_has_the_rows_that_were_measured():
    text = page.PAGE.read_text(encoding="utf-8")
    assert section_of(text, page.MARKS) == page.section()


@pytest.mark.parametrize("part", page.PARTS)
def test_what_was_measured_is_the_factor(part):
    _, _, rows = read(part)
    assert rows
    for row in rows:
        top_k = {"top-1": 1, "top-2": 2}.get(row.name.rpartition(", ")[2], TOP_K)
        assert abs(row.factor / FACTORS[row.formula](LAYERS, top_k) - 1) < ROOM, row
        assert max(row.residual, row.effect) < ROOM, row
