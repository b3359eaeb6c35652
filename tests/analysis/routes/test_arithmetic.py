"""Models in other arithmetic against weights rounded by hand."""

import pytest
import torch

from l2r.analysis.diagnostics.flips import bf16_copy
from l2r.analysis.routes.arithmetic import in_other_arithmetic, rounded
from tests.analysis.diagnostics.models import ours, stock


def test_int8_is_the_nearest_of_255_steps_of_each_channel():
    weight = torch.randn(3, 5, 7)
    got = rounded(weight, "int8")
    for channel, values in zip(weight.view(-1, 7), got.view(-1, 7), strict=True):
        step = channel.abs().max().item() / 127
        grid = step * torch.arange(-127, 128)
        nearest = (channel[:, None] - grid).abs().amin(dim=1)
        torch.testing.assert_close((values - channel).abs(), nearest, atol=1e-6, rtol=0)


def test_int8_of_transposed_experts_has_a_scale_per_column():
    weight = torch.randn(2, 7, 5)
    torch.testing.assert_close(rounded(weight, "int8", -2), rounded(weight.mT, "int8").mT)


def test_fp8_keeps_four_significant_bits():
    weight = torch.randn(64, 32)
    error = ((rounded(weight, "fp8") - weight) / weight).abs()
    normal = weight.abs() > weight.abs().amax(dim=1, keepdim=True) * 2**-6 / 448
    assert error[normal].max() <= 2**-4 + 1e-6  # half a step of 1.mmm
    assert error.mean() > 2**-8  # and it is rounded


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("make", [ours, stock])
def test_weights_of_layers_and_experts_are_rounded_and_nothing_else(make, name):
    model = make()
    other = in_other_arithmetic(model, name)
    for path, before in model.named_parameters():
        after = other.get_parameter(path)
        layer = "self_attn" in path and "norm" not in path
        if "experts" in path or layer:
            torch.testing.assert_close(after.data, rounded(before.data, name), rtol=0, atol=0)
            assert not torch.equal(after, before)
        else:
            assert torch.equal(after, before), path


def test_bf16_keeps_routers_wide_and_runs_stock_models_too():
    other = in_other_arithmetic(ours(), "bf16")
    assert {n: p.dtype for n, p in other.named_parameters()} == {
        n: p.dtype for n, p in bf16_copy(ours()).named_parameters()
    }
    other = in_other_arithmetic(stock(), "bf16")
    kinds = {p.dtype for n, p in other.named_parameters() if ".gate." in n}
    assert kinds == {torch.float32} and other.lm_head.weight.dtype == torch.bfloat16
    assert other(torch.arange(8)[None]).logits.dtype == torch.bfloat16


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="must be one of bf16, int8, fp8; got 'fp4'"):
        in_other_arithmetic(ours(), "fp4")
