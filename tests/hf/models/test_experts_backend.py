"""Our dispatch as an experts implementation gives what transformers' own gives."""

import pytest
import torch

from l2r.hf.models.experts_backend import register_experts
from l2r.hf.models.stock_models import one_layer


@pytest.mark.parametrize("skew", [False, True])
def test_forward_and_gradients_equal_eager(skew: bool) -> None:
    torch.manual_seed(0)
    experts = one_layer(hidden_size=16, num_experts=6, top_k=2).model.layers[0].mlp.experts
    scores = torch.rand(23, 6)
    if skew:
        scores[:12, 2] = 2.0
    weights, indices = scores.softmax(1).topk(2, 1)
    upstream = torch.randn(23, 16)
    results = []
    for name in ("eager", register_experts()):
        experts.config._experts_implementation = name
        x = torch.linspace(-1, 1, 23 * 16).view(23, 16).requires_grad_()
        share = weights.clone().requires_grad_()
        output = experts(x, indices, share)
        inputs = [x, share, *experts.parameters()]
        results.append([output, *torch.autograd.grad(output, inputs, upstream)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
