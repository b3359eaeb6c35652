"""Projection and norms against float64 loops."""

import numpy as np
import torch

from l2r.functional import low_rank_query, magnitude, rms_norm, standardize_magnitude
from tests import reference


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
