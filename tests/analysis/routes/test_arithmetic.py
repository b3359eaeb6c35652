"""Models in other arithmetic against weights rounded by hand."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from l2r.analysis.diagnostics.robustness import bf16_copy
from l2r.analysis.routes.arithmetic import in_other_arithmetic, rounded
from l2r.hf.swap.families import FAMILIES
from l2r.routers.observe import find_routers
from tests.analysis.diagnostics.models import ours, stock
from tests.hf.families import sample_tokens, tiny_model


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


def test_experts_that_are_stored_transposed_are_rounded_by_their_outputs():
    """gpt-oss's experts are [N, inputs, outputs]: each column has a scale and 255 steps."""
    model = tiny_model(FAMILIES["gpt_oss"])
    other = in_other_arithmetic(model, "int8")
    for path, before in model.named_parameters():
        if "experts" in path and before.dim() == 3:
            after = other.get_parameter(path).data
            torch.testing.assert_close(after, rounded(before.data, "int8", -2), rtol=0, atol=0)
            largest = before.data.abs().amax(dim=-2)
            torch.testing.assert_close(after.abs().amax(dim=-2), largest, rtol=1e-6, atol=0)


def test_bf16_keeps_routers_wide_and_runs_stock_models_too():
    other = in_other_arithmetic(ours(), "bf16")
    assert {n: p.dtype for n, p in other.named_parameters()} == {
        n: p.dtype for n, p in bf16_copy(ours()).named_parameters()
    }
    other = in_other_arithmetic(stock(), "bf16")
    kinds = {p.dtype for n, p in other.named_parameters() if ".gate." in n}
    assert kinds == {torch.float32} and other.lm_head.weight.dtype == torch.bfloat16
    assert other(torch.arange(8)[None]).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["minimax", "afmoe", "deepseek_v3", "jamba"])
def test_bf16_has_the_dtypes_of_a_bf16_load_but_for_routers_and_their_biases(family, tmp_path):
    """Buffers, too: minimax saves its decays, no checkpoint has the frequencies of positions."""
    model = tiny_model(FAMILIES[family])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    other = in_other_arithmetic(model, "bf16")
    gates = tuple(f"{path}." for path in find_routers(model))
    biases = ("e_score_correction_bias", "expert_bias")
    for name, tensor in [*other.named_parameters(), *other.named_buffers()]:
        expected = loaded.get_parameter_or_buffer(name).dtype
        routes = name.startswith(gates) or name.endswith(biases)
        assert tensor.dtype == (torch.float32 if routes else expected), name
    ids = torch.arange(3, 15)[None]
    assert other(ids).logits.dtype == torch.bfloat16
    assert {b.dtype for n, b in other.named_buffers() if "inv_freq" in n} <= {torch.float32}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@torch.no_grad()
def test_a_copy_of_the_bf16_copy_calls_its_own_routers(again):
    ids = sample_tokens()
    first = in_other_arithmetic(tiny_model(FAMILIES["mixtral"]), "bf16")
    second = again(first)
    logits = first(ids).logits
    assert torch.equal(second(ids).logits, logits)
    for router in find_routers(second).values():
        router.weight.neg_()
    assert not torch.equal(second(ids).logits, logits)
    assert torch.equal(first(ids).logits, logits)


def test_a_bf16_model_in_bf16_computes_the_same():
    model = tiny_model(FAMILIES["deepseek_v3"]).bfloat16()
    ids = torch.arange(3, 15)[None]
    assert torch.equal(in_other_arithmetic(model, "bf16")(ids).logits, model(ids).logits)


def test_kernels_of_convolutions_are_no_weights_of_linear_layers():
    model = tiny_model(FAMILIES["jamba"])
    other = in_other_arithmetic(model, "int8")
    kernels = [name for name, part in model.named_modules() if isinstance(part, nn.Conv1d)]
    assert kernels
    for name in kernels:
        before, after = (m.get_submodule(name).weight for m in (model, other))
        assert torch.equal(before, after)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="must be one of bf16, int8, fp8; got 'fp4'"):
        in_other_arithmetic(ours(), "fp4")
