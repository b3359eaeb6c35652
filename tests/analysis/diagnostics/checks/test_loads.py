"""When experts are dead or overloaded: 8 experts in 2 layers, of which each token chooses 2.

A fair share is 1/4, the limit sqrt(1/4) = 1/2. An expert with a fair share is missed by T tokens
with probability (3/4)^T, which times 16 experts is below 0.001 from T = 34 on.
"""

import pytest
import torch

from l2r.analysis.diagnostics.checks import check_model
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from tests.hf.families import tiny_model


def loads(pairs, *, different=60, **sizes):
    """The finding where token t chooses ``pairs[t % len(pairs)]``."""
    model = tiny_model(FAMILIES["olmoe"], **sizes)
    ids = (torch.arange(240) % different + 3).view(4, 60)
    chosen = torch.tensor(pairs).repeat(240 // len(pairs), 1)
    for site in router_sites(model):
        site.router.register_forward_hook(
            lambda m, a, out: (out[0], out[1], chosen) if len(out[0]) == 240 else None
        )
    (found,) = (f for f in check_model(model, {"input_ids": ids}) if f.check == "loads")
    return found


FAIR = [(0, 1), (2, 3), (4, 5), (6, 7)]
DEAD = [(0, 1), (2, 3), (4, 5), (6, 0)]
FULL = [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (0, 1)]
# Expert 0 in 6 of 10: above the limit, by less than chance allows with 60 tokens.
NEARLY = [(0, n) for n in range(1, 7)] + [(7, 1), (2, 3), (4, 5), (6, 7)]
SAME = [(2, 5)]


@pytest.mark.parametrize(
    ("pairs", "status", "words"),
    [
        (FAIR, "ok", "at most 1.0 fair shares"),
        (DEAD, "warning", "none of 60 different tokens reaches 2 experts in layers 0, 1"),
        (FULL, "warning", "gets 100% of the tokens, where a fair share is 25% and the limit 50%"),
        (NEARLY, "ok", "at most 2.4 fair shares"),
        (SAME, "fault", "every token goes to the same 2 experts in layers 0, 1"),
    ],
    ids=["fair", "dead", "full", "nearly", "same"],
)
def test_the_verdict_follows_from_the_loads(pairs, status, words):
    found = loads(pairs)
    assert found.status == status and words in found.found, found


def test_as_many_different_tokens_are_needed_as_chance_asks_for():
    assert loads(DEAD, different=34).status == "warning"
    few = loads(DEAD, different=33)
    assert few.status == "skipped"
    assert few.found == "33 different tokens are too few; 34 are needed"


def test_layers_of_a_smaller_k_that_are_not_judged_are_named():
    """Of 60 tokens, a layer that chooses one of 8 experts needs more to miss one by chance."""
    model = tiny_model(FAMILIES["olmoe"])
    ids = (torch.arange(240) % 60 + 3).view(4, 60)
    first, second = router_sites(model)
    second.router.top_k = 1
    for site, pairs in ((first, FAIR), (second, [(0,), (1,)])):
        chosen = torch.tensor(pairs).repeat(240 // len(pairs), 1)
        site.router.register_forward_hook(
            lambda m, a, out, k=chosen: (out[0], out[1], k) if len(out[0]) == 240 else None
        )
    (found,) = (f for f in check_model(model, {"input_ids": ids}) if f.check == "loads")
    assert found.status == "ok"
    assert "every expert gets some in layer 0 (layer 1 would need more tokens)" in found.found


@pytest.mark.parametrize("count", [1, 2, 8])
def test_layers_that_use_all_experts_have_no_loads_to_judge(count):
    found = loads([tuple(range(count))], num_experts=count, num_experts_per_tok=count)
    assert found.status == "skipped"
    assert found.found == "every token goes to all experts of every layer"
