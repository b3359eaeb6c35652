"""Projection and scoring against the equations of the paper, written as loops."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2r.functional import (
    cosine_scores,
    dot_scores,
    low_rank_query,
    magnitude,
    phi,
    pool_anchors,
    psi,
    rms_norm,
    sips_scores,
    standardize_magnitude,
    unit,
)
from tests import reference

SHAPES = [(1, 1, 1, 1), (5, 2, 3, 2), (7, 16, 8, 4), (3, 9, 64, 1)]  # T, R, N, H


def test_rms_norm_equals_loops():
    rng = np.random.default_rng(0)
    x, gain = rng.normal(size=(5, 9)) * 30, rng.normal(size=9)
    expected = reference.rms_normalized(x, gain)
    np.testing.assert_allclose(rms_norm(torch.tensor(x), torch.tensor(gain)), expected, rtol=1e-12)


def test_rms_norm_makes_the_query_blind_to_input_scale():
    x, weight = torch.randn(4, 16, dtype=torch.float64), torch.randn(2, 16, dtype=torch.float64)
    one = low_rank_query(rms_norm(x, eps=1e-12), weight)
    torch.testing.assert_close(low_rank_query(rms_norm(x * 1e3, eps=1e-12), weight), one)


def test_standardized_magnitude_can_be_negative():
    q = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    rho = magnitude(q)
    assert rho.tolist() == [5.0, 1.0]
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    hat = standardize_magnitude(rho, rho.mean(), rho.var(unbiased=False), one, zero, eps=0.0)
    assert hat.tolist() == [1.0, -1.0]


def test_zero_input_stays_finite():
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x).sum().backward()
    assert torch.isfinite(x.grad).all()


def draw(shape, seed):
    t, r, n, h = shape
    rng = np.random.default_rng(seed)
    return rng.normal(size=(t, r)), rng.normal(size=(n, h, r))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["dot", "cosine", "sips"])
def test_scores_equal_loops_in_float64(kind, shape):
    function = {"dot": dot_scores, "cosine": cosine_scores, "sips": sips_scores}[kind]
    q, k = draw(shape, seed=sum(shape))
    expected = [[[reference.score(kind, a, b) for b in heads] for heads in k] for a in q]
    np.testing.assert_allclose(function(torch.tensor(q), torch.tensor(k)), expected, atol=1e-12)


@pytest.mark.parametrize("function", [dot_scores, cosine_scores, sips_scores])
def test_gradients_are_exact(function):
    q, k = (torch.tensor(a, requires_grad=True) for a in draw((4, 3, 5, 2), seed=1))
    assert torch.autograd.gradcheck(function, (q, k))


@given(scale=st.floats(1e-3, 1e12), gamma=st.floats(0.1, 5), beta=st.floats(0, 1))
def test_scores_saturate(scale, gamma, beta):
    q, k = (torch.tensor(a) for a in draw((6, 4, 5, 3), seed=2))
    scores = sips_scores(q * scale, k, gamma=gamma, beta=beta, p=4.0)
    bound = gamma * (1 + beta) * psi(k.norm(dim=-1), p=4.0)
    assert (scores.abs() <= bound * (1 + 1e-12)).all()


@given(scale=st.floats(1e-2, 1e6))
def test_cosine_and_beta_zero_ignore_query_size(scale):
    q, k = (torch.tensor(a) for a in draw((6, 4, 5, 3), seed=3))
    torch.testing.assert_close(cosine_scores(q * scale, k), cosine_scores(q, k))
    sips = sips_scores(q * scale, k, beta=0.0, gamma=1.7, p=2.0)
    expected = 1.7 * psi(k.norm(dim=-1), p=2.0) * cosine_scores(q, k)
    torch.testing.assert_close(sips, expected)


def test_phi_covers_its_interval_and_no_more():
    rho = torch.linspace(-30, 30, 1001, dtype=torch.float64)
    values = phi(rho, gamma=2.0, beta=0.25)
    assert values.min() == pytest.approx(2 * 0.75) and values.max() == pytest.approx(2 * 1.25)
    assert phi(torch.zeros(1), gamma=2.0, beta=0.25).item() == 2.0


def test_psi_is_one_on_the_unit_sphere_and_damped_by_p():
    assert psi(torch.ones(3), p=4.0).tolist() == [1.0, 1.0, 1.0]
    assert psi(torch.tensor(9.0), p=4.0).item() == 3.0


def test_norms_below_a_millionth_count_as_one():
    """Eq. 16: with a norm of a quarter of the bound a cosine is a quarter of itself."""
    direction = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    for size, share in ((0.25e-6, 0.25), (1e-6, 1.0), (4e-6, 1.0)):
        query, anchor = size * direction, direction[:, None]
        assert unit(query).norm().item() == pytest.approx(share)
        assert cosine_scores(query, anchor).item() == pytest.approx(share)
        assert cosine_scores(direction, size * anchor).item() == pytest.approx(share)
        assert sips_scores(query, anchor, beta=0.0).item() == pytest.approx(share)


def test_zero_queries_and_anchors_score_zero_with_finite_gradients():
    q = torch.zeros(2, 3, requires_grad=True)
    k = torch.zeros(4, 2, 3, requires_grad=True)
    for function in (cosine_scores, sips_scores):
        scores = function(q, k)
        scores.sum().backward()
        assert (scores == 0).all() and torch.isfinite(q.grad).all() and torch.isfinite(k.grad).all()


def test_pooling_is_the_identity_for_one_anchor_and_a_smooth_maximum_for_more():
    scores = torch.randn(5, 6, 4, dtype=torch.float64) * 50
    assert torch.equal(pool_anchors(scores[..., :1]), scores[..., 0])
    pooled, top = pool_anchors(scores), scores.max(dim=-1).values
    assert (pooled >= top).all() and (pooled <= top + np.log(4) + 1e-12).all()
