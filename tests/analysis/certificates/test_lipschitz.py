"""Gradient formulas equal autograd; no gradient, sampled or searched for, exceeds a bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from l2r.analysis.certificates import lipschitz as lip
from l2r.functional import cosine_scores, pool_anchors, sips_scores

CONSTANTS = st.builds(
    lip.Sips,
    gamma=st.sampled_from([0.5, 1.0, 3.0]),
    beta=st.sampled_from([0.0, 0.25, 1.0]),
    p=st.sampled_from([1.0, 4.0, 20.0]),
)
BATCHNORM = lip.Sips(scale=-1.7, shift=0.4)


def _pairs(seed, count=64, rank=3, spread=2.0):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, count, rank)
    vectors = torch.randn(shape, generator=generator, dtype=torch.float64)
    sizes = (spread * torch.randn(2, count, 1, generator=generator, dtype=torch.float64)).exp()
    return vectors * sizes


def _score(query, anchor, sips):
    rho = torch.linalg.vector_norm(query, dim=-1)
    scores = [
        sips_scores(
            q[None],
            k.view(1, 1, -1),
            gamma=sips.gamma,
            beta=sips.beta,
            p=sips.p,
            rho_hat=sips.scale * r[None] + sips.shift,
        ).squeeze()
        for q, k, r in zip(query, anchor, rho, strict=True)
    ]
    return torch.stack(scores)


def _autograd(function, *inputs):
    points = [value.clone().requires_grad_() for value in inputs]
    return torch.autograd.grad(function(*points).sum(), points)


def _measures(query, anchor):
    rho, kappa = (torch.linalg.vector_norm(v, dim=-1) for v in (query, anchor))
    return rho, kappa, (query * anchor).sum(-1) / (rho * kappa)


@pytest.mark.parametrize("sips", [lip.Sips(), lip.Sips(2.0, 0.5, p=3.0), BATCHNORM])
def test_gradients_equal_autograd(sips):
    query, anchor = _pairs(0, spread=0.5)
    dq, dk = _autograd(lambda q, k: _score(q, k, sips), query, anchor)
    torch.testing.assert_close(lip.query_gradient(query, anchor, sips), dq)
    torch.testing.assert_close(lip.anchor_gradient(query, anchor, sips), dk)
    cosine, _ = _autograd(
        lambda q, k: torch.stack(
            [cosine_scores(a[None], b.view(1, 1, -1)).squeeze() for a, b in zip(q, k, strict=True)]
        ),
        query,
        anchor,
    )
    torch.testing.assert_close(lip.cosine_gradient(query, anchor), cosine)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), sips=CONSTANTS, rank=st.integers(2, 6))
def test_gradient_norms_are_within_the_bounds(seed, sips, rank):
    query, anchor = _pairs(seed, rank=rank)
    rho, kappa, cosine = _measures(query, anchor)
    dq = torch.linalg.vector_norm(lip.query_gradient(query, anchor, sips), dim=-1)
    dk = torch.linalg.vector_norm(lip.anchor_gradient(query, anchor, sips), dim=-1)
    across = (1 - cosine.square()).clamp_min(0).sqrt()
    own = sips.psi(kappa).abs() * torch.hypot(
        sips.slope(rho) * cosine, sips.value(rho) / rho * across
    )
    torch.testing.assert_close(own, dq, rtol=1e-6, atol=1e-9)
    room = 1 + 1e-9
    assert (dq <= lip.sharp_query_bound(rho, kappa, sips) * room).all()
    assert (dk <= lip.sharp_anchor_bound(rho, kappa, sips) * room).all()
    paper_q, paper_k = lip.query_bound(rho, kappa, sips), lip.anchor_bound(rho, kappa, sips)
    assert (lip.sharp_query_bound(rho, kappa, sips) <= paper_q * room).all()
    assert (lip.sharp_query_bound(rho, kappa, sips) >= paper_q / 2 / room).all()
    assert (lip.sharp_anchor_bound(rho, kappa, sips) <= paper_k * room).all()
    unit_cosine = torch.linalg.vector_norm(lip.cosine_gradient(query, anchor), dim=-1)
    assert (unit_cosine <= room / rho).all()


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), sips=CONSTANTS)
def test_domain_constants_hold_everywhere_and_the_sharp_ones_are_reached(seed, sips):
    domain = lip.Domain(least_query=0.3, least_anchor=0.4, most_anchor=2.5)
    constants = lip.domain_constants(domain, sips)
    query, anchor = _pairs(seed, count=256)
    rho, kappa, _ = _measures(query, anchor)
    query = query / rho[:, None] * rho.clamp_min(0.3)[:, None]
    anchor = anchor / kappa[:, None] * kappa.clamp(0.4, 2.5)[:, None]
    dq = torch.linalg.vector_norm(lip.query_gradient(query, anchor, sips), dim=-1)
    dk = torch.linalg.vector_norm(lip.anchor_gradient(query, anchor, sips), dim=-1)
    assert dq.max() <= constants["sharp_query"] * (1 + 1e-9) <= constants["query"] * (1 + 1e-8)
    assert dk.max() <= constants["sharp_anchor"] * (1 + 1e-9) <= constants["anchor"] * (1 + 1e-8)

    # Adversarial: the worst query is the shortest, at a right angle or along the anchor.
    worst = torch.tensor([[0.3, 0.0], [0.3, 0.0]], dtype=torch.float64)
    keys = torch.tensor([[0.0, 2.5], [2.5, 0.0]], dtype=torch.float64)
    reached = torch.linalg.vector_norm(lip.query_gradient(worst, keys, sips), dim=-1).max()
    assert reached.item() == pytest.approx(constants["sharp_query"], rel=1e-9)
    # For anchors phi is largest for long queries, which the domain does not limit.
    far = torch.tensor([[50.0, 0.0]], dtype=torch.float64)
    short = torch.tensor([[0.0, 0.4]], dtype=torch.float64)
    reached = torch.linalg.vector_norm(lip.anchor_gradient(far, short, sips), dim=-1)
    assert reached.item() == pytest.approx(constants["sharp_anchor"], rel=1e-9)


def test_domain_constants_are_those_of_the_paper():
    """By hand, Eq. 24 and 25: phi_max = gamma (1 + beta), psi_max = 1 + (most - 1) / p."""
    domain = lip.Domain(least_query=0.5, least_anchor=0.25, most_anchor=3.0)
    constants = lip.domain_constants(domain, lip.Sips(2.0, 0.25, p=4.0))
    phi_max, psi_max = 2.0 * 1.25, 1 + 2.0 / 4
    assert constants["query"] == pytest.approx(psi_max * (2.0 * 0.25 + phi_max / 0.5))
    assert constants["anchor"] == pytest.approx(phi_max * (1 / 4 + psi_max / 0.25))


def test_gradient_ascent_finds_no_gradient_above_the_bounds():
    domain = lip.Domain(least_query=0.2, least_anchor=0.5, most_anchor=2.0)
    for sips in (lip.Sips(), lip.Sips(0.7, 0.5, p=2.0), BATCHNORM):
        constants = lip.domain_constants(domain, sips)
        query, anchor = _pairs(3, count=32, spread=0.5)
        for _ in range(60):
            q, k = query.clone().requires_grad_(), anchor.clone().requires_grad_()
            slope = torch.linalg.vector_norm(lip.query_gradient(q, k, sips), dim=-1)
            dq, dk = torch.autograd.grad(slope.sum(), (q, k))
            query, anchor = query + 0.05 * dq, anchor + 0.05 * dk
            rho, kappa, _ = _measures(query, anchor)
            query = query / rho[:, None] * rho.clamp_min(0.2)[:, None]
            anchor = anchor / kappa[:, None] * kappa.clamp(0.5, 2.0)[:, None]
        found = torch.linalg.vector_norm(lip.query_gradient(query, anchor, sips), dim=-1).max()
        assert found <= constants["sharp_query"] * (1 + 1e-9)
        if sips.scale == 1:
            assert found >= 0.95 * constants["sharp_query"]


def test_no_logit_is_steeper_than_the_bound_of_its_steepest_anchor():
    query = _pairs(5, count=20, rank=2, spread=0.5)[0]
    anchors = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(1)).double()
    slopes = torch.autograd.functional.jacobian(
        lambda q: pool_anchors(sips_scores(q, anchors)).sum(0), query
    )
    rho, kappa = (torch.linalg.vector_norm(v, dim=-1) for v in (query, anchors))
    bound = lip.sharp_query_bound(rho[:, None], kappa.amax(dim=1)[None], lip.Sips())
    assert (torch.linalg.vector_norm(slopes.transpose(0, 1), dim=-1) <= bound + 1e-12).all()


def test_a_domain_names_what_is_wrong():
    with pytest.raises(ValueError, match="least_query > 0"):
        lip.Domain(least_query=0.0, least_anchor=1.0, most_anchor=1.0)
