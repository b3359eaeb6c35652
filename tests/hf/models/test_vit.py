"""ViT with experts: structure of the paper, save and load, upcycling, counts."""

import inspect
import math

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from l2r import capture
from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.hf.checkpoints import load_image_classifier
from l2r.hf.models import L2rViTConfig, L2rViTForImageClassification
from l2r.hf.models.size import vit_cost, vit_s_costs
from l2r.hf.models.vit import L2rViTModel
from l2r.moe import MoELayer

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 5,
}


def small(kind="l2r_sips", **changes):
    options = {"num_experts": 4, "moe_layers": [1, 2], "router": {"kind": kind}}
    return L2rViTForImageClassification(L2rViTConfig(**{**SMALL, **options, **changes}))


def test_defaults_are_the_papers_vit_s():
    config = L2rViTConfig()
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (
        12,
        384,
        6,
    )
    assert (config.image_size, config.patch_size, config.hidden_act) == (224, 16, "gelu")
    assert (config.num_experts, config.num_experts_per_tok) == (16, 2)
    assert config.moe_layers == [8, 9, 10, 11]
    router = config.router
    assert (router["kind"], router["rank"], router["heads"]) == ("l2r_sips", 2, 4)
    assert router["query_norm"] == "batchnorm"


def test_the_headless_model_shows_and_takes_the_options_of_transformers_own():
    assert inspect.signature(L2rViTModel).parameters.keys() == (
        inspect.signature(ViTModel).parameters.keys()
    )
    config = small().config
    assert L2rViTModel(config).pooler is not None
    model = L2rViTModel(config, add_pooling_layer=False, use_mask_token=True)
    assert model.pooler is None
    assert model.embeddings.mask_token is not None


def test_experts_sit_in_the_chosen_blocks_only():
    model = small(moe_layers=[0, 2])
    kinds = [type(layer.mlp).__name__ for layer in model.vit.layers]
    assert kinds == ["MoELayer", "ViTMLP", "MoELayer"]
    assert not any(isinstance(m, MoELayer) for m in small(moe_layers=[]).modules())


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
def test_every_router_trains_every_parameter(kind):
    model = small(kind)
    images = torch.randn(6, 3, 16, 16)
    with capture(model) as record:
        loss = model(images, labels=torch.tensor([0, 1, 2, 3, 4, 0])).loss
    loss.backward()
    assert [tuple(z.shape) for z in record.logits()] == [(6 * 17, 4)] * 2
    untouched = [n for n, p in model.named_parameters() if p.grad is None]
    assert untouched == []


def test_block_equals_a_float64_loop_over_tokens():
    layer = small().eval().vit.layers[1].mlp
    x = torch.randn(1, 9, 32)
    with torch.no_grad():
        _, weights, indices = layer.router(x)
        got = layer(x)[0].double().numpy()
    e = {n: p.detach().double().numpy() for n, p in layer.experts.named_parameters()}
    for t in range(9):
        want = np.zeros(32)
        for i, w in zip(indices[t].tolist(), weights[t].tolist(), strict=True):
            hidden = e["up_proj"][i] @ x[0, t].double().numpy() + e["up_bias"][i]
            hidden = np.array([0.5 * h * (1 + math.erf(h / math.sqrt(2))) for h in hidden])
            want += w * (e["down_proj"][i] @ hidden + e["down_bias"][i])
        np.testing.assert_allclose(got[t], want, atol=1e-6)


def test_models_that_differ_in_the_router_alone_start_alike():
    states = []
    for kind in PAPER_ROUTERS:
        torch.manual_seed(3)
        states.append(small(kind).state_dict())
    shared = [name for name in states[0] if ".router." not in name]
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in shared)


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
def test_saved_model_comes_back_through_the_auto_class(kind, tmp_path):
    model = small(kind)
    model(torch.randn(4, 3, 16, 16))  # moves the running statistics of the query norm
    model.eval().save_pretrained(tmp_path)
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        expected = model(images).logits
        again = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
        assert type(again) is L2rViTForImageClassification
        assert torch.equal(again(images).logits, expected)
        assert torch.equal(load_image_classifier(tmp_path)(images).logits, expected)


def test_router_stays_fp32_in_a_half_precision_model(tmp_path):
    small().save_pretrained(tmp_path)
    model = L2rViTForImageClassification.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.vit.layers[0].mlp.fc1.weight.dtype == torch.bfloat16
    assert {p.dtype for p in model.vit.layers[1].mlp.router.parameters()} == {torch.float32}
    assert model.eval()(torch.randn(2, 3, 16, 16)).logits.isfinite().all()


def test_upcycled_model_computes_what_the_dense_one_does(tmp_path):
    dense = ViTForImageClassification(ViTConfig(**SMALL)).eval()
    dense.save_pretrained(tmp_path)  # under the key names of published checkpoints
    router = {"kind": "l2r_sips", "normalize_weights": True}
    config = L2rViTConfig(**SMALL, layer_norm_eps=1e-12, moe_layers=[1, 2], router=router)
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        expected = dense(images).logits
        for source in (dense, tmp_path):
            model = L2rViTForImageClassification.from_dense(source, config).eval()
            torch.testing.assert_close(model(images).logits, expected, atol=1e-5, rtol=1e-5)
        # The paper's unnormalized weights shrink the blocks' outputs, so this must differ.
        plain = L2rViTForImageClassification.from_dense(dense).eval()
        assert plain.config.moe_layers == [0, 1, 2]
        assert not torch.allclose(plain(images).logits, expected, atol=1e-3)


def test_upcycling_keeps_a_fresh_classifier_for_other_classes():
    dense = ViTForImageClassification(ViTConfig(**SMALL))
    config = L2rViTConfig(**{**SMALL, "num_labels": 7})
    model = L2rViTForImageClassification.from_dense(dense, config)
    assert model.classifier.weight.shape == (7, 32)
    up = model.vit.layers[2].mlp.experts.up_proj
    assert all(torch.equal(expert, dense.vit.layers[2].mlp.fc1.weight) for expert in up)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"moe_layers": [3]}, "moe_layers must lie between 0 and 2"),
        ({"hidden_act": "relu"}, "hidden_act must be 'gelu'"),
        ({"router": {"kind": "l2r_sip"}}, "did you mean 'l2r_sips'"),
        ({"router": {"kind": "l2r_sips", "rank": 64}}, "rank must be <= hidden_size"),
    ],
)
def test_bad_configurations_are_refused_in_one_line(changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)


def test_upcycling_refuses_other_sizes():
    dense = ViTForImageClassification(ViTConfig(**SMALL))
    with pytest.raises(ValueError, match=r"same sizes; .*up_proj is \(16, 48, 32\) there"):
        L2rViTForImageClassification.from_dense(
            dense, L2rViTConfig(**{**SMALL, "intermediate_size": 64})
        )


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        ({}, {"num_attention_heads": 4}, "num_attention_heads is 2 there and 4 here"),
        ({"hidden_act": "relu"}, {}, "hidden_act is 'relu' there and 'gelu' here"),
        ({"num_hidden_layers": 2}, {"moe_layers": [1]}, "num_hidden_layers is 2 there and 3 here"),
    ],
)
def test_upcycling_refuses_what_computes_otherwise_with_the_same_shapes(theirs, ours, words):
    dense = ViTForImageClassification(ViTConfig(**{**SMALL, **theirs}))
    with pytest.raises(ValueError, match=words):
        L2rViTForImageClassification.from_dense(dense, L2rViTConfig(**{**SMALL, **ours}))


def test_no_averaged_weights_is_one_clear_line(tmp_path):
    with pytest.raises(ValueError, match=r"train with training\.ema_decay > 0"):
        load_image_classifier(tmp_path, averaged=True)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_image_classifier(tmp_path)


# Written out by hand from the sizes in the paper, not from the code.
D, F, N, K, TOKENS, BLOCKS = 384, 1536, 16, 2, 197, 4
ROUTER_PARAMETERS = {
    "linear": N * D,
    "linear_sips": N * D + 2,
    "xmoe": 8 * D + 8 * N,
    "l2r_dot": 2 * D + N * 4 * 2,
    "l2r_cosine": 2 * D + N * 4 * 2,
    "l2r_sips": 2 * D + N * 4 * 2 + 2,
}


@pytest.fixture(scope="module")
def costs():
    return vit_s_costs()


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
def test_full_size_counts_equal_the_formula(kind, costs):
    dense = costs["dense"]
    assert dense.size.parameters == 22_050_664  # ViT-S/16 with 1000 classes
    assert 2 * 4.5e9 < dense.flops < 2 * 4.65e9  # 4.6 G multiply-adds
    cost = costs[kind]
    mlp = 2 * D * F + F + D
    router = BLOCKS * ROUTER_PARAMETERS[kind]
    assert cost.size.routers == router
    assert cost.size.parameters == dense.size.parameters + BLOCKS * (N - 1) * mlp + router
    assert cost.size.active == dense.size.parameters + BLOCKS * (K - 1) * mlp + router
    matrices = {"linear": N * D, "linear_sips": N * D}.get(kind, cost.size.routers // BLOCKS)
    matrices -= 2 if kind == "l2r_sips" else 0
    assert cost.router_flops == BLOCKS * TOKENS * 2 * matrices
    # The weighted sum of K outputs counts where it runs as a matrix product.
    combine = BLOCKS * TOKENS * 2 * K * D
    extra = BLOCKS * TOKENS * (K - 1) * 2 * 2 * D * F
    assert cost.flops - (dense.flops + extra + cost.router_flops) in (0, combine)


def test_routers_counted_alone_are_those_of_the_whole_model(costs):
    whole = vit_cost(L2rViTConfig(num_labels=1000, router={"kind": "xmoe"}))
    assert costs["xmoe"] == whole
