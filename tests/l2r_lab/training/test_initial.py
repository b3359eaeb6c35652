"""Initial weights on two ranks are those of one process, and no rank holds them all."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

import l2r_lab.routers  # noqa: F401  the registry gets all routers
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
)
from l2r_lab.training.initial import build_model
from l2r_lab.training.parallel import gathered_weights, parallelize, whole_model
from l2r_lab.training.ranks import Ranks
from tests.processes import on_two_ranks

LANGUAGE = {
    "vocab_size": 67,  # of which no rank gets a half
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 9,  # an odd number
    "num_experts_per_tok": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_experts": 9,  # an odd number
    "moe_layers": [1, 2],
    "num_labels": 3,
}
SIPS = {"kind": "l2r_sips", "rank": 2, "heads": 3}


def olmoe(router, **options):
    return L2rOlmoeForCausalLM(L2rOlmoeConfig(**LANGUAGE, router=router, **options))


def vit():
    return L2rViTForImageClassification(L2rViTConfig(**VISION))


MODELS = {
    "linear": functools.partial(olmoe, {"kind": "linear"}),
    "xmoe": functools.partial(olmoe, {"kind": "xmoe", "learn_temperature": True}),
    "l2r": functools.partial(olmoe, {**SIPS, "anchor_init": "even", "learn_temperature": True}),
    "batchnorm": functools.partial(olmoe, {**SIPS, "query_norm": "batchnorm"}),
    "biased": functools.partial(olmoe, {**SIPS, "selection_bias": True}),
    "product_keys": functools.partial(olmoe, {"kind": "product_keys"}),
    "perturbed_cosine": functools.partial(olmoe, {"kind": "perturbed_cosine"}),
    "tied": functools.partial(olmoe, SIPS, tie_word_embeddings=True),
    "vit": vit,
}
FORMS = ("ddp", "fsdp2")


def task(name, *, draws_weights=True):
    return SimpleNamespace(build_model=MODELS[name], draws_weights=draws_weights)


def numbers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def built(name, form, ranks, *, draws_weights=True):
    """Whole weights on the first rank, and buffers, next random number and held numbers of each."""
    torch.manual_seed(3)
    model, weights = build_model(task(name, draws_weights=draws_weights), form, ranks)
    started = sum(p.numel() for p in model.parameters() if not p.is_meta)
    model = parallelize(model, form, ranks, weights)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {
        "weights": gathered_weights(model),
        "buffers": numbers(whole_model(model)),
        "next": torch.rand(()).item(),
        "held": (started, sum(p.numel() for p in local)),
        "parameters": len(local),
    }


def on_rank(rank):
    ranks = Ranks(rank, 2, torch.device("cpu"))
    cells = {(name, form): built(name, form, ranks) for name in MODELS for form in FORMS}
    return cells | {"from files": built("l2r", "fsdp2", ranks, draws_weights=False)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return on_two_ranks(on_rank, tmp_path_factory.mktemp("ranks"))


def alone(name):
    return built(name, "ddp", Ranks(0, 1, torch.device("cpu")))


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_start_with_the_weights_of_one(name, form, ran):
    one = alone(name)
    assert_equal(ran[0][name, form]["weights"], one["weights"])
    for rank in ran:
        assert_equal(rank[name, form]["buffers"], one["buffers"])
        assert rank[name, form]["next"] == one["next"]
        assert rank[name, form]["parameters"] == one["parameters"]


def test_no_rank_holds_more_than_its_own(ran):
    for name in MODELS:
        whole = alone(name)["held"][0]
        (first, its), (second, others) = (rank[name, "fsdp2"]["held"] for rank in ran)
        assert first == second == 0  # on meta, until they are sharded
        assert its + others == whole
        (first, its), (second, others) = (rank[name, "ddp"]["held"] for rank in ran)
        assert (first, second) == (whole, 0)  # DDP sends the first rank's
        assert its == others == whole


def test_weights_from_files_are_read_by_every_rank(ran):
    assert_equal(ran[0]["from files"]["weights"], alone("l2r")["weights"])
