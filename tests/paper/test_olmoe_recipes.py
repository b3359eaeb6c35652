"""Every value of the paper's OLMoE hyperparameter table (Table 12), recipe by recipe."""

import dataclasses

import pytest
import torch

from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.routers import Router
from l2r_lab.training.recipes.load import load_recipe, recipe_header, recipe_names

MAIN = ["linear", "linear-sips", "xmoe", "l2r-dot", "l2r-cosine", "l2r-sips"]
RANKS = {f"l2r-sips-rank-{rank}": (rank, 4) for rank in (2, 8, 32)}
HEADS = {f"l2r-sips-heads-{heads}": (2, heads) for heads in (1, 4, 8, 16, 64)}
DOT_H1 = "l2r-dot-heads-1"
ALL = [*MAIN, *RANKS, *HEADS, DOT_H1]

TABLE = {
    "model.hidden_size": 2048,
    "model.num_hidden_layers": 16,
    "model.num_attention_heads": 16,
    "model.intermediate_size": 1024,  # MLP ratio 1: gate and up together are d_model wide
    "data.sequence_length": 4096,
    "model.vocab_size": 50280,
    "losses.balance": 0.01,
    "losses.z": 0.001,
    "optimizer.lr": 4e-4,
    "optimizer.warmup": 300_000_000,
    "training.global_batch": 1024,
    "model.num_experts": 64,
    "model.num_experts_per_tok": 8,
    "optimizer.betas": (0.9, 0.95),
    "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1,
    "training.tokens": 10_000_000_000,
    "training.micro_batch": 1,
    "training.parallel": "ddp",
}


def value(recipe, path):
    for part in path.split("."):
        recipe = getattr(recipe, part)
    return recipe


def test_all_recipes_of_the_study_are_there():
    found = {n.removeprefix("olmoe-1b-7b/") for n in recipe_names() if n.startswith("olmoe")}
    assert found == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_recipe_holds_every_value_of_the_table(name):
    recipe = load_recipe(f"olmoe-1b-7b/{name}")
    for path, expected in TABLE.items():
        assert value(recipe, path) == expected, path
    router = recipe.router
    if name in RANKS or name in HEADS:
        assert (router.rank, router.heads) == {**RANKS, **HEADS}[name]
    if "l2r-sips" in name:
        assert (router.gamma, router.beta, router.p, router.query_norm) == (1, 1, 4, "rmsnorm")
    if name == "xmoe":
        assert router.rank == 32
    assert not router.normalize_weights and not router.learn_temperature


@pytest.mark.parametrize(("name", "heads"), [(DOT_H1, 1), ("l2r-dot", 16), ("l2r-cosine", 16)])
def test_rows_other_than_sips_differ_from_it_in_scoring_and_heads_alone(name, heads):
    router = load_recipe(f"olmoe-1b-7b/{name}").router
    sips = load_recipe(f"olmoe-1b-7b/l2r-sips-heads-{heads}").router
    assert router.scoring != "sips" and router.heads == heads
    assert dataclasses.replace(router, scoring="sips") == sips


@pytest.mark.parametrize("name", ["l2r-dot", "l2r-cosine"])
def test_recipes_of_rows_without_a_number_of_heads_say_so_and_claim_nothing(name):
    header = recipe_header(f"olmoe-1b-7b/{name}")
    assert "the paper does not say how many" in header and "Reproduces" not in header
    assert "RMSNorm" in header and "docs/paper-notes.md" in header


@pytest.mark.parametrize("name", ALL)
def test_recipe_builds_the_full_model_without_memory(name):
    recipe = load_recipe(f"olmoe-1b-7b/{name}")
    with torch.device("meta"):
        model = L2rOlmoeForCausalLM(L2rOlmoeConfig(**recipe.model_options(vocab_size=1)))
    total = sum(p.numel() for p in model.parameters())
    routers = [m for m in model.modules() if isinstance(m, Router)]
    assert round(total / 1e9, 2) == 6.92 and len(routers) == 16
    assert model.config.tie_word_embeddings is False and not model.config.attention_bias
    assert model.model.layers[0].mlp.experts.act_fn(torch.ones(1)).item() == pytest.approx(
        0.7311, abs=1e-4
    )
