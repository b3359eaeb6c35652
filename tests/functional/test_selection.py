"""Weights of chosen experts against arithmetic in numpy, and the dtypes of products."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from l2r.functional import expert_weights, select_experts
from l2r.functional.autocast import product_inputs


@pytest.mark.parametrize("norm_eps", [0.0, 1e-20, 0.25])
def test_weights_are_the_chosen_probabilities_over_their_sum_and_norm_eps(norm_eps):
    probs = torch.tensor([[0.5, 0.125, 0.25, 0.125], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    indices = torch.tensor([[0, 2], [3, 1]])
    chosen = np.take_along_axis(probs.numpy(), indices.numpy(), axis=1)
    assert_close(expert_weights(probs, indices).numpy(), chosen, rtol=0, atol=0)
    weights = expert_weights(probs, indices, normalize=True, norm_eps=norm_eps)
    expected = chosen / (chosen[:, :1] + chosen[:, 1:] + norm_eps)
    assert_close(weights.numpy(), expected, rtol=1e-15, atol=0)
    selected, found = select_experts(probs, 2, normalize=True, norm_eps=norm_eps)
    assert found.tolist() == [[0, 2], [3, 2]]
    assert_close(selected[0], weights[0], rtol=1e-15, atol=0)


def test_products_are_in_the_dtype_of_autocast_but_for_float64():
    x, weight = torch.ones(2), torch.ones(2)
    assert product_inputs(x, weight) == (x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert [t.dtype for t in product_inputs(x, weight)] == [torch.bfloat16] * 2
        wide = x.double()
        assert product_inputs(wide, weight)[0] is wide
