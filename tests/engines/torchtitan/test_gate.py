"""torchtitan's router with our gate chooses and weighs as ours."""

import dataclasses

import pytest
import torch

from l2r import build_router
from l2r.routers import RouterConfig
from tests.engines.engines import ROUTERS, SIPS, assert_close

from .models import EXPERTS, TOP_K, UP, WIDTH, X, built

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")


def ours_like(layer, router, **options):
    config = dataclasses.replace(RouterConfig.from_dict(router), **options)
    own = build_router(config, hidden_size=WIDTH, num_experts=EXPERTS, top_k=TOP_K)
    with torch.no_grad():
        for flat, name in layer.router.gate.plug.names.items():
            target = own.get_parameter(name)
            target.copy_(getattr(layer.router.gate, flat).view(target.shape))
    return own


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ROUTERS)
def test_the_router_weighs_and_learns_as_ours(kind, normalize):
    router = {"kind": kind, **ROUTERS[kind]}
    layer = built(router, route_norm=normalize)
    own = ours_like(layer, router, normalize_weights=normalize)
    scores, chosen, _ = layer.router(X)
    out = own(X)
    order = chosen.flatten(0, 1).argsort(-1)
    ours = out.indices.argsort(-1)
    assert torch.equal(chosen.flatten(0, 1).gather(1, order), out.indices.gather(1, ours))
    assert_close(scores.flatten(0, 1).gather(1, order), out.weights.gather(1, ours), "weights")
    (layer.router.gate(X) * UP).sum().backward()
    (out.logits * UP.flatten(0, 1)).sum().backward()
    for flat, name in layer.router.gate.plug.names.items():
        gradient = getattr(layer.router.gate, flat).grad
        expected = own.get_parameter(name).grad
        assert expected.abs().max() > 0
        assert_close(gradient.view(expected.shape), expected, name)


@pytest.mark.engine("torchtitan", "train step")
def test_a_layer_learns_and_its_bias_decides_with_our_logits():
    """Experts run in bf16, which torchtitan fixes; the layer is what runs on a CPU."""
    layer = built(SIPS)
    target = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(3))
    steps = torch.optim.AdamW(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        loss = (layer(X) - target).square().mean()
        loss.backward()
        assert all(p.grad.abs().max() > 0 for p in layer.router.gate.parameters())
        steps.step()
        steps.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0], losses
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    assert (layer.router(X, bias)[1] == 3).any(-1).all()
