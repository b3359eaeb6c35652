"""The balance loss of transformers' families: the equation, and ours in its place in Trainer."""

import pytest
import torch

from scripts.others.coefficients import references
from scripts.others.coefficients.batch import COEFFICIENT, TOP_K, as_weights, batch_logits
from scripts.others.coefficients.measure import ROOM, check_equation, difference
from scripts.others.coefficients.ours import one_step
from scripts.others.coefficients.stock import FAMILIES, SIZES, small, stock_losses

IDS = torch.randint(2, SIZES["vocab_size"], (4, 12), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=list(FAMILIES))
def test_the_family_adds_its_equation(number):
    loss, logits = stock_losses()[number], batch_logits()
    x, weights = as_weights(logits)
    check_equation(loss, logits, TOP_K, loss.balance(x, weights, TOP_K, None))


def gradients(family, micro_batches, losses):
    """Gradients of the router weights of a whole model, its task's part in them."""
    model = small(family, layers=2, experts=4, top_k=2)
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    found = one_step(model, rows, micro_batches=micro_batches, losses=losses)
    return {name: g for name, g in found.items() if name.endswith("gate.weight")}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_ours_in_place_of_the_familys_own(family, micro_batches):
    """Trainer adds the model's own loss in every micro-batch: twice with two of them."""
    own = gradients(family, micro_batches, None)
    balance = COEFFICIENT * micro_batches
    here = {"balance": balance, "balance_variant": "hf"}
    found = gradients(family, micro_batches, here)
    without = gradients(family, micro_batches, here | {"balance": 0.0})
    assert len(own) == 2
    for name, gradient in own.items():
        assert difference(found[name], gradient) < ROOM, name
        assert difference(without[name], gradient) > 10 * ROOM, name


def test_pooled_layers_are_not_the_mean_of_layers():
    logits = batch_logits().double()
    assert references.pooled(logits, TOP_K) < 0.8 * references.switch(logits, TOP_K)
