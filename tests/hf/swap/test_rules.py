"""Every family's rule in the table gives what the family's router gives, whatever its settings."""

from itertools import islice, product

import pytest
import torch

from l2r.hf.swap import recognition
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import find_sites
from tests.hf.families import each_rule, tiny_model

DRAWS = 16  # of settings, biases and modes, each with 64 tokens, after those of one setting each
LOW = 80.0  # by how much some logits are lower: sigmoids so small that what is added to them counts


def cases(name):
    """Copies of a family's router with random weights, biases and settings, and their outputs."""
    model = tiny_model(FAMILIES[name])
    site = next(site for site in find_sites(model) if not site.by_token)
    block = model.get_submodule(site.path.rpartition(".")[0])
    contract = recognition._contract(site.router, block)
    settings = recognition.settings_of(site.router)
    draws = recognition._draws(site.router, contract, None)
    found = [case for _, case in islice(draws, DRAWS + len(settings))]
    words = [name for name, value in settings if isinstance(value, str)]
    for number, (setting, word) in enumerate(product(words, recognition._WORDS)):
        draw = recognition._Draw(number, changed={setting: word})
        found.append(recognition._play(site.router, contract, draw))
    return [case for case in found if case is not None]  # none where a router knows no such word


@pytest.mark.parametrize("name", each_rule(FAMILIES))
def test_a_rule_gives_the_experts_and_weights_of_its_router(name, monkeypatch):
    monkeypatch.setattr(recognition, "_SHIFT", LOW)
    rule = recognition._with_configuration(FAMILIES[name].rule)
    with torch.random.fork_rng(), torch.no_grad():
        gaps = [recognition._gap(rule, case) for case in cases(name)]
    assert len(gaps) >= DRAWS and all(gap.closed for gap in gaps)
