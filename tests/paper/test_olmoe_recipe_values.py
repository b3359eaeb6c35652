"""Every value of the paper's hyperparameter table for OLMoE (Table 12), typed in from the paper."""

import pytest

from l2r_lab.training.recipes.load import load_recipe, parse_recipe, recipe_names

# Item of the table -> (field of the recipe, value).
TABLE = {
    "d_model": ("model.hidden_size", 2048),
    "transformer layers": ("model.num_hidden_layers", 16),
    "attention heads": ("model.num_attention_heads", 16),
    # OLMoE's MLP ratio of 1 counts the two halves of SwiGLU: each is half of d_model.
    "MLP ratio 1": ("model.intermediate_size", 1024),
    "experts N": ("model.num_experts", 64),
    "top-k": ("model.num_experts_per_tok", 8),
    "maximum sequence length": ("data.sequence_length", 4096),
    "load-balance weight": ("losses.balance", 0.01),
    "z-loss weight": ("losses.z", 0.001),
    "learning rate": ("optimizer.lr", 4e-4),
    "betas": ("optimizer.betas", (0.9, 0.95)),
    "epsilon": ("optimizer.eps", 1e-8),
    "weight decay": ("optimizer.weight_decay", 0.1),
    "warmup tokens": ("optimizer.warmup", 300_000_000),
    "total tokens": ("training.tokens", 10_000_000_000),
    "global batch size": ("training.global_batch", 1024),
    "microbatch size": ("training.micro_batch", 1),
    "distributed training": ("training.parallel", "ddp"),
}
# The default values of the schema, then every recipe that claims to be the paper's.
RECIPES = {
    "defaults": parse_recipe(
        {"task": "language", "training": {"tokens": 10_000_000_000}}, source="defaults"
    ),
    **{name: load_recipe(name) for name in recipe_names() if name.startswith("olmoe-1b-7b/")},
}


def value_of(recipe, path):
    for part in path.split("."):
        recipe = getattr(recipe, part)
    return recipe


@pytest.mark.parametrize("item", TABLE)
@pytest.mark.parametrize("name", RECIPES)
def test_value_is_the_papers(name, item):
    field, expected = TABLE[item]
    assert value_of(RECIPES[name], field) == expected


@pytest.mark.parametrize("name", RECIPES)
def test_vocabulary_is_50280_by_field_or_by_tokenizer(name):
    assert RECIPES[name].model.vocab_size in (None, 50280)
