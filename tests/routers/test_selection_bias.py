"""The selection bias of any router: it decides who is chosen and weighs nothing."""

import dataclasses

import numpy as np
import pytest
import torch

from l2r import L2RConfig, Router, RouterConfig, build_router, register_router
from l2r.functional import expert_usage
from l2r.hf.swap.sites import new_router, router_sites
from l2r.routers import make_config, router_names
from l2r.routers.config import ROUTERS
from l2r.routers.selection_bias import update_selection_bias
from l2r.routers.selection_rule import Selection
from l2r_lab.routers.sigmoid import SigmoidConfig
from tests.routers.test_selection_rule import _reference

SIZES = {"hidden_size": 16, "num_experts": 8, "top_k": 2}
BIAS = "e_score_correction_bias"
KINDS_TRIED = [kind for kind in router_names() if not kind.startswith("test_")]


def make(kind, **options):
    torch.manual_seed(1)
    return build_router(kind, **SIZES, selection_bias=True, **options).double()


@pytest.mark.parametrize("kind", KINDS_TRIED)
@pytest.mark.parametrize("normalize", [False, True])
def test_every_router_chooses_with_its_bias_and_weighs_without(kind, normalize):
    router = make(kind, normalize_weights=normalize)
    bias = torch.tensor([0.0, 0.4, -0.3, 0.2, 0.0, -0.5, 0.1, 0.3], dtype=torch.float64)
    router.get_buffer(BIAS).copy_(bias)
    x = torch.randn(20, 16, dtype=torch.float64)
    logits, weights, indices = router(x)
    rule = dataclasses.replace(router.selection, bias=None)
    expected, chosen = _reference(logits.detach().numpy(), 2, rule, bias.numpy())
    np.testing.assert_array_equal(indices, chosen)
    np.testing.assert_allclose(weights.detach(), expected, rtol=1e-9)
    unbiased = rule(router, logits)[1]
    assert not torch.equal(indices, unbiased)
    assert torch.equal(rule.weigh(router, logits, indices), weights)
    for ours, theirs in zip(router.choose(x), (weights, indices), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS_TRIED)
def test_the_bias_is_a_buffer_without_a_gradient_that_starts_at_zero(kind):
    router = make(kind)
    assert not router.get_buffer(BIAS).any()
    assert BIAS not in dict(router.named_parameters())
    router(torch.randn(5, 16, dtype=torch.float64)).weights.sum().backward()
    assert not router.get_buffer(BIAS).requires_grad
    with torch.no_grad():
        router.get_buffer(BIAS).fill_(1)
    again = make(kind)
    again.load_state_dict(router.state_dict())
    assert again.get_buffer(BIAS).eq(1).all()
    router.reset_parameters()
    assert not router.get_buffer(BIAS).any()
    config = RouterConfig.from_dict(router.config.to_dict())
    assert config == router.config and config.selection_bias


@pytest.mark.parametrize("kind", ["linear", "l2r_sips", "product_keys"])
def test_the_bias_moves_a_planted_skew_towards_balance(kind):
    """All tokens share a direction, so that all like the same experts. After the bias has moved,
    the largest load is nearer to the mean than halfway; the logits are as they were."""
    router = make(kind)
    x = torch.randn(16, dtype=torch.float64) + 0.5 * torch.randn(512, 16, dtype=torch.float64)
    before = router(x)
    loads = []
    for _ in range(200):
        loads.append(expert_usage(router(x).indices, 8))
        update_selection_bias(router.get_buffer(BIAS), loads[-1], speed=0.004)
    first, later = loads[0], torch.stack(loads[-40:]).mean(0)  # equals take turns
    mean = first.mean()
    assert first.max() > 1.5 * mean
    assert later.max() - mean < 0.5 * (first.max() - mean)
    assert torch.equal(router(x).logits, before.logits)


@pytest.mark.parametrize("kind", KINDS_TRIED)
def test_without_the_setting_a_router_has_no_bias(kind):
    router = build_router(kind, **SIZES, selection_bias=False)
    assert BIAS not in router.state_dict()
    assert router.selection.bias is None and router.selection.held_bias(router) is None


def test_only_sigmoid_has_it_by_default():
    having = [kind for kind in KINDS_TRIED if make_config(kind).selection_bias]
    assert having == ["sigmoid"]


def test_a_router_with_a_selection_of_its_own_gets_the_bias_too():
    try:

        @register_router("test_own_selection")
        class OwnSelection(Router):
            Config = RouterConfig

            def own_selection(self):
                return Selection(gate="sigmoid", scale=3.0)

            def raw_logits(self, x):
                return x[:, :8]

        router = make("test_own_selection")
    finally:
        ROUTERS.pop("test_own_selection")
    assert router.selection == Selection(gate="sigmoid", scale=3.0, bias=BIAS)
    router.get_buffer(BIAS)[5] = 9
    assert router(torch.randn(3, 16)).indices[:, 0].tolist() == [5, 5, 5]


def test_a_bias_in_a_family_that_decides_its_own_is_refused():
    from l2r.hf.swap.families import FAMILIES
    from tests.hf.families import tiny_model

    (site, *_) = router_sites(tiny_model(FAMILIES["mixtral"]))
    config = L2RConfig(rank=2, selection_bias=True)
    with pytest.raises(ValueError, match="selection_bias is decided by the model's family"):
        new_router(site, config)
    assert new_router(site, config, "router").selection.bias == BIAS
    assert new_router(site, SigmoidConfig()).selection.bias is None


def test_sigmoid_scores_can_start_equally_large_at_any_width():
    torch.manual_seed(0)
    router = build_router("sigmoid", hidden_size=400, num_experts=64, top_k=2, init_std=None)
    deviation = router.weight.std().item()
    assert deviation == pytest.approx(400**-0.5, rel=0.014 + 5 / (2 * 64 * 400) ** 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_in_which_updates_are_lost_is_refused(dtype):
    """0.5 + 0.001 is 0.5 in bfloat16."""
    bias = torch.full((4,), 0.5, dtype=dtype)
    with pytest.raises(ValueError, match="bias must be float32 or wider"):
        update_selection_bias(bias, torch.tensor([4, 0, 2, 2]))
