"""Weights of recorded experts come from the live logits by the family's rule, with its gradient."""

import random

import numpy as np
import pytest
import torch

from l2r import LinearConfig, record, replay
from l2r.hf.routes import Fingerprint
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import new_router, old_weight, router_sites
from tests.hf.families import matrix_of_logits, tiny_model
from tests.hf.family_sizes import TINY
from tests.hf.routes.by_hand import weights_by_hand
from tests.hf.routes.made import drawn
from tests.hf.swap.test_selections import draw_settings, passed_to
from tests.tiers import few_families

TOKENS = 24


def drawn_routes(router_or_model, seed=0):
    """Routes that the router did not choose, of one sequence."""
    sites = router_sites(router_or_model)
    sizes = sites[0].sizes
    layers = tuple(site.layer for site in sites)
    of = Fingerprint(num_experts=sizes["num_experts"], top_k=sizes["top_k"], layers=layers)
    return drawn((TOKENS,), of, seed=seed)


def bound(reference, terms):
    """Rounding errors of float32 in a sum of ``terms`` products, several operations each."""
    return 16 * torch.finfo(torch.float32).eps * terms**0.5 * reference.abs().max().item()


@pytest.mark.parametrize("swapped", [False, True], ids=["stock", "swapped"])
@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_gradients_of_the_router_equal_a_reference_that_gathers_by_hand(name, swapped):
    model = tiny_model(FAMILIES[name])
    site = router_sites(model)[0]
    hidden, *more = passed_to(model, site.path)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, TINY["hidden_size"], generator=draw) / 4
    shares = torch.randn(TOKENS, site.sizes["top_k"], generator=draw)
    chance = random.Random(0)
    for again in range(5):
        if again:
            draw_settings(site.router, chance)
        router = site.router
        if swapped:
            router = new_router(site, LinearConfig())
            with torch.no_grad():
                router.weight.copy_(matrix_of_logits(site))
        weight = router.weight if swapped else old_weight(site)
        routes = drawn_routes(router)
        with replay(router, routes):
            inputs = x.expand(1, -1, -1) if hidden.dim() == 3 else x
            _, weights, indices = router(inputs, *more)
        assert np.array_equal(indices.numpy(), routes.experts[:, 0])
        weight.grad = None
        (weights * shares).sum().backward()

        exact = weight.detach().double().requires_grad_()
        factor = 1 if swapped else getattr(site.router, "output_multiplier", 1)  # Muse Spark's
        logits = factor * (x.double() @ exact.T)
        reference = weights_by_hand(name, site.router, logits, indices)
        (reference * shares.double()).sum().backward()
        torch.testing.assert_close(
            weights.double(), reference, rtol=0, atol=bound(reference, TINY["hidden_size"])
        )
        assert exact.grad.abs().max() > 1e-3  # a gradient that died would pass unseen
        torch.testing.assert_close(
            weight.grad.double(), exact.grad, rtol=0, atol=bound(exact.grad, TOKENS)
        )


@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_weighing_its_own_choice_gives_a_family_its_own_weights(name):
    model = tiny_model(FAMILIES[name])
    site = router_sites(model)[0]
    hidden, *more = passed_to(model, site.path)
    chance = random.Random(0)
    for again in range(13):
        if again:
            draw_settings(site.router, chance)
        logits, weights, indices = site.router(hidden, *more)
        weighed = site.selection.weigh(site.router, logits, indices)
        torch.testing.assert_close(weighed, weights, rtol=1e-5, atol=0)


def test_experts_outside_of_the_kept_groups_have_a_gradient():
    """The trap of gathering from scores that are zero there."""
    site = router_sites(tiny_model(FAMILIES["deepseek_v2"]))[0]
    assert site.selection.kept_groups < site.selection.groups
    x = torch.randn(TOKENS, TINY["hidden_size"])
    logits, _, own = site.router(x)
    half = site.sizes["num_experts"] // 2
    other = torch.where(own < half, own + half, own - half)  # of the group that is dropped
    weights = site.selection.weigh(site.router, logits, other)
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    assert (weights > 0).all()
    assert (gradient.gather(1, other) != 0).all()


def test_unlikely_experts_are_normalized_without_dividing_zero_by_zero():
    site = router_sites(tiny_model(FAMILIES["mixtral"]))[0]
    logits = torch.full((1, 8), -200.0, requires_grad=True)
    with torch.no_grad():
        logits[0, 0] = 200.0
    weights = site.selection.weigh(site.router, logits, torch.tensor([[3, 5]]))
    assert weights.tolist() == [[0.5, 0.5]]
    (gradient,) = torch.autograd.grad(weights[0, 0], logits)
    assert gradient[0, [3, 5]].tolist() == [0.25, -0.25]


def test_a_sampled_phimoe_trains_with_the_recorded_sample():
    """In training the family draws its experts: a recomputation would draw others."""
    model = tiny_model(FAMILIES["phimoe"]).train()
    site = router_sites(model)[0]
    routes = drawn_routes(site.router)
    x = torch.randn(TOKENS, TINY["hidden_size"])
    with replay(site.router, routes):
        _, weights, indices = site.router(x)
    assert np.array_equal(indices.numpy(), routes.experts[:, 0])
    weights.sum().backward()
    assert site.router.weight.grad.isfinite().all()
    assert site.router.weight.grad.abs().max() > 0
    with record(site.router) as recorder:
        _, own, chosen = site.router(x)
    # Of the family's three thirds an expert has one or all, as chance says.
    weighed = site.selection.weigh(site.router.eval(), site.router(x)[0], chosen)
    thirds = (own / weighed).detach()
    assert ((thirds - 1).abs().lt(1e-3) | (thirds - 0.3333).abs().lt(1e-3)).all()
    assert np.array_equal(recorder.routes().experts[:, 0], chosen.numpy())


def test_recorded_weights_are_taken_as_they_are():
    model = tiny_model(FAMILIES["olmoe"])
    router = router_sites(model)[0].router
    x = torch.randn(TOKENS, TINY["hidden_size"])
    with record(router, weights=True) as recorder:
        _, weights, indices = router(x)
    routes = recorder.routes()
    assert np.array_equal(routes.weights[:, 0], weights.detach().numpy())
    with torch.no_grad():
        router.weight.mul_(-1)
    with replay(router, routes, weights="recorded"):
        _, again, chosen = router(x)
    assert torch.equal(chosen, indices)
    assert torch.equal(again, weights)
    assert not again.requires_grad or torch.autograd.grad(again.sum(), router.weight)[0].eq(0).all()
    with replay(router, routes):
        _, live, chosen = router(x)
    assert torch.equal(chosen, indices)
    assert not torch.allclose(live, weights)


def test_routes_without_weights_cannot_give_them():
    router = router_sites(tiny_model(FAMILIES["olmoe"]))[0].router
    routes = drawn_routes(router)
    with (
        pytest.raises(ValueError, match="needs routes of record"),
        replay(router, routes, weights="recorded"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="weights must be live or recorded; got weights='mine'"),
        replay(router, routes, weights="mine"),
    ):
        pass


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3"])
@torch.no_grad()
def test_weights_of_a_generation_of_several_rows_stay_with_their_tokens(name):
    """Recorded step by step over the rows, and in one forward over the result: but for rounding."""
    model = tiny_model(FAMILIES[name])
    ids = torch.randint(3, TINY["vocab_size"], (3, 5), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with record(model, weights=True) as recorder:
        tokens = model.generate(ids, **options)
    generated = recorder.routes()
    with record(model, weights=True) as recorder:
        model(tokens[:, :-1], use_cache=False)
    whole = recorder.routes()
    assert np.array_equal(generated.experts, whole.experts)
    np.testing.assert_allclose(generated.weights, whole.weights, rtol=1e-4, atol=1e-6)
    spread = np.abs(whole.weights - np.roll(whole.weights, 1, axis=0)).max()
    assert spread > 1e-3  # of another token they are others


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "gpt_oss"])
@torch.no_grad()
def test_a_token_without_a_route_has_weights_of_its_own_beside_recorded_ones(name):
    model = tiny_model(FAMILIES[name])
    ids = torch.randint(3, TINY["vocab_size"], (1, 6), generator=torch.Generator().manual_seed(1))
    with record(model, weights=True) as recorder:
        logits = model(ids, use_cache=False).logits
    part = recorder.routes().truncated(4).extended(2)
    with replay(model, part, weights="recorded"):
        again = model(ids, use_cache=False).logits
    assert torch.equal(again, logits)
