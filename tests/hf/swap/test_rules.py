"""Every family's rule in the table gives what the family's router gives, whatever its settings."""

from itertools import islice

import pytest
import torch

from l2r.hf.swap import recognition
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import find_sites
from tests.hf.families import tiny_model

DRAWS = 16  # of settings, biases and modes, each with 64 tokens; the first are of one setting each
LOW = 80.0  # by how much some logits are lower: sigmoids so small that what is added to them counts


def cases(name):
    """Copies of a family's router with random weights, biases and settings, and their outputs."""
    model = tiny_model(FAMILIES[name])
    site = next(site for site in find_sites(model) if not site.by_token)
    block = model.get_submodule(site.path.rpartition(".")[0])
    contract = recognition._contract(site.router, block)
    draws = recognition._draws(site.router, contract, None)
    settings = len(recognition.settings_of(site.router))
    return [case for _, case in islice(draws, DRAWS + settings)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rule_gives_the_experts_and_weights_of_its_router(name, monkeypatch):
    monkeypatch.setattr(recognition, "_SHIFT", LOW)
    rule = recognition._with_configuration(FAMILIES[name].rule)
    with torch.random.fork_rng(), torch.no_grad():
        gaps = [recognition._gap(rule, case) for case in cases(name)]
    assert len(gaps) >= DRAWS and all(gap.closed for gap in gaps)
