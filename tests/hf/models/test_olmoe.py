"""OLMoE with our routers inside transformers: save, load, generate, record, initialize."""

import math

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    OlmoeConfig,
    OlmoeForCausalLM,
)
from transformers.integrations import moe as hf_moe

from l2r import capture
from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.hf.checkpoints import load_causal_lm
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.models.olmoe import L2rOlmoeModel
from l2r.hf.models.version_names import checkpoint_activations
from l2r.routers import Router
from tests.processes import script
from tests.tiers import few

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 1,
    "eos_token_id": 0,
}
IDS = torch.arange(2, 20).view(2, 9)


def build(kind="l2r_sips", seed=0, **options):
    torch.manual_seed(seed)
    config = L2rOlmoeConfig(router={"kind": kind, **options}, **SIZES)
    return L2rOlmoeForCausalLM(config).eval()


@pytest.mark.slow("a fresh process")
def test_a_fresh_process_loads_the_same_logits(tmp_path):
    for kind in PAPER_ROUTERS:
        model = build(kind)
        model.save_pretrained(tmp_path / "models" / kind)
        torch.save(model(IDS).logits, tmp_path / "models" / kind / "logits.pt")
    code = f"""
import pathlib, torch, l2r.hf.models
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
torch.manual_seed(99)
for folder in sorted(pathlib.Path({str(tmp_path)!r}, "models").iterdir()):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(2, 20).view(2, 9)
    difference = (model(ids).logits - torch.load(folder / "logits.pt")).abs().max()
    assert difference <= 1e-6, (folder, difference)
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)
    print(folder.name)
"""
    assert sorted(script(tmp_path, code).succeed().split()) == sorted(PAPER_ROUTERS)


def test_generation_with_the_cache_equals_generation_without():
    model = build()
    with_cache = model.generate(IDS, max_new_tokens=5, do_sample=False)
    without = model.generate(IDS, max_new_tokens=5, do_sample=False, use_cache=False)
    assert torch.equal(with_cache, without)


def test_stock_checkpoint_loads_unchanged_with_its_linear_router(tmp_path):
    stock = OlmoeForCausalLM(OlmoeConfig(**SIZES)).eval()
    stock.save_pretrained(tmp_path)
    ours = L2rOlmoeForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(ours(IDS).logits, stock(IDS).logits, atol=1e-6, rtol=0)


def test_stock_experts_load_unchanged_under_another_router(tmp_path):
    stock = OlmoeForCausalLM(OlmoeConfig(**SIZES))
    stock.save_pretrained(tmp_path)
    ours = L2rOlmoeForCausalLM.from_pretrained(tmp_path, router={"kind": "l2r_sips", "heads": 4})
    theirs = stock.state_dict()
    for name, value in ours.state_dict().items():
        if ".mlp.gate." not in name:
            assert torch.equal(value, theirs[name]), name
    anchors = ours.model.layers[1].mlp.gate.anchors
    torch.testing.assert_close(anchors.norm(dim=-1), torch.ones(8, 4))


def test_grouped_mm_is_what_runs(monkeypatch):
    model = build()
    calls = []
    original = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    model(IDS)
    assert len(calls) == 2 * SIZES["num_hidden_layers"]
    assert hf_moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] is not None


def test_routers_differ_and_nothing_else_does():
    linear, sips = build("linear").state_dict(), build("l2r_sips").state_dict()
    shared = [name for name in linear if ".mlp.gate." not in name]
    assert len(shared) > 10 and all(torch.equal(linear[n], sips[n]) for n in shared)
    other = build("l2r_sips", seed=1).state_dict()
    names = [n for n in sips if "projection" in n or "anchors" in n]
    assert len(names) == 4 and not any(torch.equal(sips[n], other[n]) for n in names)
    assert not torch.equal(*(sips[n] for n in names if "anchors" in n))


@pytest.mark.parametrize("kind", ["xmoe", "l2r_sips"])
def test_the_headless_model_starts_from_the_same_weights(kind):
    whole = build(kind).model.state_dict()
    torch.manual_seed(0)
    alone = L2rOlmoeModel(L2rOlmoeConfig(router={"kind": kind}, **SIZES)).state_dict()
    assert alone.keys() == whole.keys()
    different = [name for name, value in alone.items() if not torch.equal(value, whole[name])]
    assert different == []


def test_generation_is_a_direct_base_as_in_transformers_own_models():
    assert L2rOlmoeForCausalLM.__bases__[-1] is GenerationMixin


def test_initial_weights_are_olmoes_truncated_normal():
    model = build("linear")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            assert parameter.abs().max() <= 0.06 + 1e-6, name
            assert 0.015 < parameter.std() < 0.025, name


def test_router_logits_are_recorded_by_transformers_and_by_capture():
    model = build()
    with capture(model) as captured:
        output = model(IDS, output_router_logits=True)
    assert len(output.router_logits) == 2
    for theirs, ours in zip(output.router_logits, captured.logits(), strict=True):
        assert torch.equal(theirs, ours)


def test_router_stays_in_fp32_inside_a_bf16_model(tmp_path):
    build().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    gate = model.model.layers[0].mlp.gate
    assert {p.dtype for p in gate.parameters()} == {torch.float32}
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
    assert model(IDS).logits.dtype == torch.bfloat16


def test_gradient_checkpointing_keeps_the_routers_auxiliary_gradient():
    from l2r.functional import load_balancing_loss

    grads = []
    for checkpointing in (False, True):
        model = build().train()
        if checkpointing:
            checkpoint_activations(model)
        with capture(model) as captured:
            loss = model(IDS, use_cache=False).logits.square().mean()
        loss = loss + load_balancing_loss(captured.logits(), captured.indices())
        loss.backward()
        grads.append(model.model.layers[0].mlp.gate.anchors.grad)
    torch.testing.assert_close(grads[0], grads[1])
    assert grads[0].abs().sum() > 0


@pytest.mark.parametrize("kind", few(PAPER_ROUTERS, ("linear", "l2r_sips"), "trainings"))
def test_a_tiny_model_overfits_one_batch(kind):
    model = build(kind).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 60)  # settle in the minimum
        loss = model(IDS, labels=IDS, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    blind = math.log(IDS[:, 1:].numel())  # knows the tokens, all different, but no context
    assert loss.item() < 0.1 * blind


def test_config_is_complete_and_checked(tmp_path):
    config = L2rOlmoeConfig(router={"kind": "l2r_sips", "rank": 4}, **SIZES)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.router == config.router and again.router["heads"] == 16
    assert again.model_type == "l2r_olmoe"
    with pytest.raises(ValueError, match="no option 'rnk'"):
        L2rOlmoeConfig(router={"kind": "l2r_sips", "rnk": 4})


def test_full_model_has_the_papers_6_92_billion_parameters():
    with torch.device("meta"):
        model = L2rOlmoeForCausalLM(L2rOlmoeConfig(router={"kind": "l2r_sips"}))
    total = sum(p.numel() for p in model.parameters())
    routers = sum(
        p.numel() for m in model.modules() if isinstance(m, Router) for p in m.parameters()
    )
    assert round(total / 1e9, 2) == 6.92 and routers == 131_072


def test_loading_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"folder with config.json or model/config.json"):
        load_causal_lm(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"config\.json is not a readable JSON object"):
        load_causal_lm(tmp_path)
