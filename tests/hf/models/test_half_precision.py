"""A half-precision load gives half precision everywhere but in the routers, and runs."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from l2r import L2RConfig, Router
from l2r.hf.checkpoints import load_pretrained
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
)
from l2r.hf.models.experts_backend import register_experts
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import TINY, sample_tokens, tiny_model

HALVES = (torch.bfloat16, torch.float16)


def olmoe(kind="l2r_sips", **changes):
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    config = L2rOlmoeConfig(**(sizes | changes), num_experts=8, router={"kind": kind})
    return L2rOlmoeForCausalLM(config).eval()


def in_routers(model):
    """Names of the parameters and buffers of the routers."""
    paths = [path for path, module in model.named_modules() if isinstance(module, Router)]
    return {name for name in model.state_dict() if name.startswith(tuple(f"{p}." for p in paths))}


def dtypes(model):
    return {name: value.dtype for name, value in model.state_dict().items()}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["linear", "l2r_sips"])
def test_only_the_routers_of_olmoe_stay_in_fp32(kind, dtype, tmp_path):
    olmoe(kind).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    routers = in_routers(model)
    assert routers
    expected = {n: torch.float32 if n in routers else dtype for n in model.state_dict()}
    assert dtypes(model) == expected


@pytest.mark.parametrize("dtype", HALVES)
def test_only_the_routers_of_the_vit_stay_in_fp32(dtype, tmp_path):
    config = L2rViTConfig(
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=48,
        num_hidden_layers=2,
        image_size=16,
        patch_size=4,
        moe_layers=[1],
    )
    L2rViTForImageClassification(config).save_pretrained(tmp_path)
    model = L2rViTForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    routers = in_routers(model)
    counters = {n for n, t in model.state_dict().items() if not t.is_floating_point()}
    assert any("running_mean" in name for name in routers)
    for name, found in dtypes(model).items():
        if name not in counters:
            assert found == (torch.float32 if name in routers else dtype), name


@pytest.mark.parametrize("name", ["olmoe", "qwen2_moe", "afmoe", "gpt_oss", "deepseek_v3"])
def test_a_swapped_family_has_its_own_dtypes_outside_the_routers(name, tmp_path):
    plain = tiny_model(FAMILIES[name])
    plain.save_pretrained(tmp_path / "plain")
    stock = dtypes(load_pretrained(tmp_path / "plain", dtype=torch.bfloat16))
    swap_routers(plain, L2RConfig(rank=2, heads=4)).save_pretrained(tmp_path / "swapped")
    model = load_pretrained(tmp_path / "swapped", dtype=torch.bfloat16)
    routers = in_routers(model)
    assert any(name.endswith("anchors") for name in routers)
    for key, found in dtypes(model).items():
        assert found == (torch.float32 if key in routers else stock[key]), key
    model.save_pretrained(tmp_path / "half")
    assert dtypes(load_pretrained(tmp_path / "half")) == dtypes(model)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm", "l2r"])
def test_every_experts_implementation_runs_in_bf16(implementation, tmp_path):
    register_experts()
    reference = olmoe(num_experts_per_tok=8)  # all of them: rounding cannot change the choice
    reference.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation=implementation
    )
    with torch.no_grad():
        logits = model(sample_tokens()).logits
        exact = reference(sample_tokens()).logits
    assert logits.dtype == torch.bfloat16
    # 8 bits of mantissa, about ten roundings on the way through two layers.
    assert (logits.float() - exact).abs().max() <= 10 * 2**-8 * exact.abs().max()
