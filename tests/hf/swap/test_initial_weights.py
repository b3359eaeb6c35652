"""A swapped model made without memory, and what a checkpoint lacks, start as stock models do."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from l2r import L2RConfig
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
)
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import find_sites
from l2r.routers import make_config, router_names
from tests.hf.families import TINY, auto_class, tiny_model
from tests.tiers import few

ROUTER = L2RConfig(rank=2, heads=4)
NAN = float("nan")
BIASED = ("ernie4_5_moe", "deepseek_v3", "laguna", "minimax_m2", "lfm2_moe", "afmoe", "hy_v3")


def made_on_meta(config, router=None):
    """A model whose memory held NaN before its first weights, as large models start."""
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
        if router is not None:
            swap_routers(model, router)
    return started(model)


def started(model):
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.fill_(NAN)
    model.init_weights()
    return model


def tensors(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


def unset(model):
    return [name for name, tensor in tensors(model).items() if not tensor.isfinite().all()]


def biases(model):
    """Selection biases, in the router or in the block around it."""
    return {
        n: t for n, t in tensors(model).items() if n.endswith(("correction_bias", "expert_bias"))
    }


@pytest.mark.parametrize("name", few(FAMILIES, ("mixtral", "qwen3_next", *BIASED), "every family"))
def test_every_tensor_of_a_model_made_on_meta_is_set_and_a_selection_bias_zero(name):
    config = tiny_model(FAMILIES[name]).config
    stock, ours = made_on_meta(config), made_on_meta(config, ROUTER)
    assert unset(ours) == unset(stock)
    assert biases(ours).keys() == biases(stock).keys()
    assert bool(biases(ours)) == (
        name in BIASED or any(site.selection.bias for site in find_sites(stock))
    )
    assert all(not bias.any() for model in (stock, ours) for bias in biases(model).values())


@pytest.fixture
def _memory_holds_nan():
    torch.use_deterministic_algorithms(True)  # fills what it takes
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_memory_holds_nan")
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("name", few(FAMILIES, BIASED, "every family"))
def test_what_a_checkpoint_lacks_is_set_and_a_selection_bias_zero(name, swap, tmp_path):
    model = tiny_model(FAMILIES[name])
    stock_config = model.config
    if swap:
        swap_routers(model, ROUTER)
    routers = tuple(f"{site.path}." for site in find_sites(model))
    every = tensors(model)
    gone = {n: t for n, t in every.items() if n in biases(model) or n.startswith(routers)}
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored, names = load_file(file), revert_weight_conversion(model, dict(gone))
    save_file({n: stored[n] for n in stored.keys() - names}, file, metadata={"format": "pt"})
    assert gone and names.keys() <= stored.keys()
    opened = auto_class(stock_config).from_pretrained(tmp_path)
    assert unset(opened) == []
    assert all(not bias.any() for bias in biases(opened).values())
    kept = [n for n in every if n not in gone]
    assert [n for n in kept if not torch.equal(tensors(opened)[n], every[n])] == []


@pytest.mark.parametrize("kind", router_names())
def test_every_tensor_of_every_router_of_ours_is_set(kind):
    config = tiny_model(FAMILIES["mixtral"]).config
    ours = made_on_meta(config, make_config(kind))
    assert unset(ours) == []
    with_bias = make_config(kind, selection_bias=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        swap_routers(model, with_bias, selection="router")
    assert unset(started(model)) == []
    assert len(biases(model)) == 2 and all(not bias.any() for bias in biases(model).values())


def own():
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    router = {"kind": "l2r_sips", "rank": 2, "selection_bias": True}
    return L2rOlmoeForCausalLM(L2rOlmoeConfig(**sizes, num_experts=4, router=router))


def vit():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = L2rViTConfig(**sizes, num_hidden_layers=2, image_size=8, patch_size=4, num_experts=4)
    return L2rViTForImageClassification(config)


@pytest.mark.parametrize("build", [own, vit])
def test_so_is_every_tensor_of_our_own_models(build):
    with torch.device("meta"):
        model = build()
    assert unset(started(model)) == []


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "deepseek_v3", "minimax_m2"])
def test_a_model_with_weights_keeps_them_as_a_stock_one_does(name):
    """What was trained, or carried over by the swap, is no missing weight."""
    model = tiny_model(FAMILIES[name])
    for _ in ("stock", "swapped"):
        before = {n: t.clone() for n, t in tensors(model).items()}
        model.init_weights()
        assert [n for n, t in tensors(model).items() if not torch.equal(t, before[n])] == []
        swap_routers(model, ROUTER)
