"""Counts of whole models: every parameter, the active ones, and the table of the recipes."""

import json

import pytest
import torch

from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, L2rViTConfig
from l2r.hf.models.size import model_size
from l2r.hf.models.vit import L2rViTForImageClassification
from l2r_lab.training.recipes.load import recipes_in


def test_active_parameters_of_olmoe_are_those_one_token_meets():
    d, f, n, k, vocabulary, layers = 16, 8, 4, 2, 20, 3
    config = L2rOlmoeConfig(
        hidden_size=d,
        intermediate_size=f,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=n,
        num_experts_per_tok=k,
        vocab_size=vocabulary,
        router={"kind": "l2r_sips", "rank": 2, "heads": 4},
    )
    size = model_size(L2rOlmoeForCausalLM(config))
    router = 2 * d + n * 4 * 2 + d  # projection, anchors, gain of the norm
    attention, norms, expert = 4 * d * d, 4 * d, 3 * d * f
    rest = 2 * vocabulary * d + d + layers * (attention + norms + router)
    assert size == (rest + layers * n * expert, rest + layers * k * expert, layers * router, 192)


def test_a_vit_counts_only_its_sparse_blocks():
    config = L2rViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=8,
        moe_layers=[2],
        num_experts=4,
        num_experts_per_tok=1,
        num_labels=2,
    )
    with torch.device("meta"):
        model = L2rViTForImageClassification(config)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    size = model_size(model)
    assert experts > 0 and size.parameters - size.active == experts * 3 // 4
    assert size.linear_routers == 4 * 16


@pytest.mark.slow("every recipe")
def test_every_olmoe_recipe_is_counted_at_full_size(l2r):
    code, out, _ = l2r("params", "--recipes", "olmoe-1b-7b", "--json")
    rows = {row["recipe"]: row for row in json.loads(out)}
    assert code == 0 and len(rows) == len(recipes_in("olmoe-1b-7b"))
    for row in rows.values():
        assert round(row["parameters"] / 1e9, 2) == 6.92
        assert round(row["active"] / 1e9, 2) == 1.28
    assert rows["olmoe-1b-7b/l2r-sips"]["in routers"] == "131.072K (6.25%)"


def test_an_unknown_folder_is_one_line(l2r):
    code, _, err = l2r("params", "--recipes", "olmo")
    assert code == 2 and "known: demo" in err
