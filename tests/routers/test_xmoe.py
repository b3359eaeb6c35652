"""X-MoE's three presets against the formulas of their code bases, in float64."""

import math

import numpy as np
import pytest
import torch

from l2r import XMoEConfig, build_router
from l2r.routers import constrain


def build(source):
    config = XMoEConfig.preset(source)
    router = build_router(config, hidden_size=300, num_experts=6, top_k=2).double()
    x = torch.randn(7, 300, dtype=torch.float64)
    q = x.numpy() @ router.projection.weight.detach().numpy().T
    if router.projection.bias is not None:
        q = q + router.projection.bias.detach().numpy()
    return router, x, q, router.anchors.detach().numpy()[:, 0]


def unit(rows, eps):
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), eps)


def test_torchscale_normalizes_anchors_only_and_keeps_them_at_norm_1_5():
    router, x, q, k = build("torchscale")
    output = router(x)
    np.testing.assert_allclose(output.logits.detach(), q @ unit(k, 1e-6).T, atol=1e-10)
    # The norm is set in fp32.
    torch.testing.assert_close(router.anchors.norm(dim=-1).flatten().float(), torch.full((6,), 1.5))
    before = router.anchors.detach().clone()
    torch.nn.init.constant_(router.anchors, 2)
    router(x)
    assert (router.anchors == 2).all()  # a forward changes nothing
    router.anchors.detach().copy_(2 * before)
    constrain(router)
    torch.testing.assert_close(router.anchors.detach().float(), before.float())


def test_fairseq_uses_a_learned_scale_and_a_sigmoid_gate():
    router, x, q, k = build("fairseq")
    expected = unit(q, 1e-4) @ unit(k, 1e-4).T / 0.07
    output = router(x)
    np.testing.assert_allclose(output.logits.detach(), expected, atol=1e-8)
    top = np.sort(expected, axis=1)[:, ::-1][:, :2]
    np.testing.assert_allclose(output.weights.detach(), 1 / (1 + np.exp(-top)), atol=1e-8)


def test_tutel_has_bias_rank_256_and_a_log_scale_of_at_most_100():
    router, x, q, k = build("tutel")
    assert router.projection.bias is not None and router.anchors.shape == (6, 1, 256)
    np.testing.assert_allclose(
        router.logits(x).detach(), unit(q, 1e-6) @ unit(k, 1e-6).T / 0.5, atol=1e-8
    )
    router.log_temperature.data.fill_(math.log(1e-9))
    np.testing.assert_allclose(
        router.logits(x).detach(), unit(q, 1e-6) @ unit(k, 1e-6).T * 100, atol=1e-6
    )


def test_default_rank_is_half_the_experts_as_in_the_papers_table():
    router = build_router("xmoe", hidden_size=128, num_experts=64, top_k=8)
    assert router.anchors.shape == (64, 1, 32) and router.projection.bias is None


@pytest.mark.parametrize("source", ["torchscale", "fairseq", "tutel"])
def test_presets_survive_the_dictionary_form(source):
    config = XMoEConfig.preset(source)
    assert XMoEConfig.from_dict(config.to_dict()) == config
