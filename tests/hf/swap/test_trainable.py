"""Train the routers alone, or freeze them alone: stock, swapped and own models."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from l2r import L2RConfig
from l2r.hf.swap import freeze_routers, train_routers_only
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from l2r.hf.swap.swap import replace_routers
from tests.analysis.diagnostics.models import ours
from tests.hf.families import sample_tokens, tiny_model
from tests.tiers import few

NAMES = ("olmoe", "gpt_oss", "deepseek_v3", "ernie4_5_moe")


def swapped(name):
    return replace_routers(tiny_model(FAMILIES[name]), L2RConfig(rank=2, heads=4))


MODELS = {
    **{f"stock {name}": lambda name=name: tiny_model(FAMILIES[name]) for name in NAMES},
    **{f"swapped {name}": lambda name=name: swapped(name) for name in NAMES},
    "own": ours,
}


def named(model):
    """Router parameters that a gradient reaches, by name."""
    sites = router_sites(model)
    return [
        f"{site.path}.{name}"
        for site in sites
        for name, _ in site.router.named_parameters()
        if "score_correction" not in name
    ]


def steps(model, tmp_path):
    """Names of the parameters that a few steps of transformers' Trainer change."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    data = [{"input_ids": ids, "labels": ids} for ids in sample_tokens(4)]
    options = TrainingArguments(
        str(tmp_path), max_steps=3, learning_rate=0.01, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(model, options, train_dataset=data).train()
    return {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}


@pytest.mark.parametrize("kind", few(MODELS, ("stock gpt_oss", "swapped deepseek_v3"), "trainings"))
def test_the_routers_alone_train(kind, tmp_path):
    model = MODELS[kind]()
    names = train_routers_only(model)
    assert names == named(model)
    assert steps(model, tmp_path) == set(names)


@pytest.mark.parametrize("kind", few(MODELS, ("stock gpt_oss", "swapped deepseek_v3"), "trainings"))
def test_frozen_routers_stay_and_the_rest_trains(kind, tmp_path):
    model = MODELS[kind]()
    names = freeze_routers(model)
    assert names == named(model)
    changed = steps(model, tmp_path)
    assert not changed & set(names) and "model.norm.weight" in changed
    assert any("experts" in name for name in changed)


def test_models_without_routers_are_refused():
    for call in (train_routers_only, freeze_routers):
        with pytest.raises(ValueError, match="no router of a supported family"):
            call(nn.Linear(2, 2))


def test_a_quantized_router_cannot_train():
    model = tiny_model(FAMILIES["olmoe"])
    router = router_sites(model)[1].router
    router.weight = nn.Parameter(router.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"layers.1.mlp.gate.weight is torch.int8"):
        train_routers_only(model)
    assert all(p.requires_grad for p in model.lm_head.parameters())  # nothing was changed
