"""LoRA on top of a swapped model: adapters train, the router trains as a saved module."""

import copy

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    get_peft_model,
)
from transformers import AutoModelForCausalLM

from l2r import L2RConfig, Router, capture
from l2r.hf.checkpoints import load_pretrained
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from tests.hf.families import sample_tokens, tiny_model

# PEFT 0.x still asks transformers 5 by a deprecated name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

# Projections of the attention: DeepSeek's are named otherwise.
TARGETS = {"deepseek_v3": ["q_a_proj", "o_proj"]}


def adapted(name):
    model = tiny_model(FAMILIES[name])
    names = {site.path.rpartition(".")[2] for site in router_sites(model)}
    swap_routers(model, L2RConfig(rank=2, heads=4))
    config = LoraConfig(
        r=2,
        target_modules=TARGETS.get(name, ["q_proj", "v_proj"]),
        modules_to_save=sorted(names),
    )
    return get_peft_model(model, config)


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_adapters_and_routers_train_while_the_rest_is_frozen(name):
    model = adapted(name)
    ids = sample_tokens()
    with capture(model) as record:
        loss = model(input_ids=ids, labels=ids).loss
    assert record.outputs  # capture sees the router inside PEFT's wrapper
    loss.backward()
    gradients = {n for n, p in model.named_parameters() if p.grad is not None}
    assert any("lora_B" in n for n in gradients)
    assert any("modules_to_save" in n and n.endswith("anchors") for n in gradients)
    assert all("lora_" in n or "modules_to_save" in n for n in gradients)


def test_a_saved_adapter_comes_back_on_the_saved_swap(tmp_path):
    model = adapted("olmoe")
    base = swap_routers(tiny_model(FAMILIES["olmoe"]), L2RConfig(rank=2, heads=4))
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.add_(0.1)
        expected = model(input_ids=sample_tokens()).logits
    model.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load_pretrained(tmp_path / "base"), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(again(input_ids=sample_tokens()).logits, expected)


# PEFT's own patterns for the stacked experts of this family, which are not linear layers; it says
# so of transformers' unchanged OLMoE as well.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_adapters_on_every_linear_layer_leave_the_router_alone():
    model = swap_routers(tiny_model(FAMILIES["olmoe"]), L2RConfig(rank=2, heads=4))
    adapters = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    names = [name for name, _ in adapters.named_parameters() if "lora_" in name]
    assert any("q_proj" in name for name in names)
    assert not any(".gate." in name for name in names)


def test_routers_that_carry_lora_are_refused_before_anything_changes():
    model = get_peft_model(
        tiny_model(FAMILIES["olmoe"]), LoraConfig(r=2, target_parameters=["gate.weight"])
    )
    with pytest.raises(ValueError, match=r"routers carry adapters .*; merge them or swap first"):
        swap_routers(model, L2RConfig(rank=2, heads=4))
    assert not any(isinstance(module, Router) for module in model.modules())


def test_a_router_that_peft_saves_is_recorded_once_per_layer():
    adapters = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"])
    model = get_peft_model(tiny_model(FAMILIES["olmoe"]), adapters)
    swap_routers(model, L2RConfig(rank=2, heads=4))
    assert model.config.l2r_swap[-1]["layers"] == [0, 1]


CHOICES = [
    LoraConfig(r=2, target_modules="all-linear"),
    LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "up_proj"]),
]


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("name", "config"),
    # PEFT has layers by default for Mixtral, though none for LoRA.
    [(n, c) for n in ("olmoe", "mixtral", "qwen3_moe") for c in CHOICES]
    + [("mixtral", LoHaConfig())],
)
def test_the_same_layers_are_adapted_before_and_after_a_swap(name, config):
    def adapters(model):
        adapted = get_peft_model(model, copy.deepcopy(config))
        names = {n for n, p in adapted.named_parameters() if p.requires_grad and ".gate." not in n}
        assert names
        return names

    model = tiny_model(FAMILIES[name])
    swapped = swap_routers(copy.deepcopy(model), L2RConfig(rank=2, heads=4))
    assert adapters(swapped) == adapters(model)


@pytest.mark.parametrize("swapped", [False, True], ids=["stock", "swapped"])
@pytest.mark.parametrize("name", ["olmoe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_adapters_on_the_routers_weights_train_and_merge(name, swapped):
    model = tiny_model(FAMILIES[name])
    path = router_sites(model)[0].path.rpartition(".")[2]
    weight = f"{path}.projection.weight" if swapped else f"{path}.weight"
    if swapped:
        swap_routers(model, L2RConfig(rank=2, heads=4))
    assert any(key.endswith(weight) for key, _ in model.named_parameters())
    targets = TARGETS.get(name, ["q_proj", "v_proj"])
    adapters = LoraConfig(r=2, target_modules=targets, target_parameters=[weight])
    model, ids = get_peft_model(model, adapters), sample_tokens()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    moved = [p for n, p in model.named_parameters() if f".{path}." in n and "lora_B" in n]
    assert moved and all(p.abs().max() > 0 for p in moved)
    model.eval()
    with torch.no_grad():
        trained = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, trained, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_auto_peft_opens_adapter_and_swapped_base(task, tmp_path):
    swap_routers(tiny_model(FAMILIES["mixtral"]), L2RConfig(rank=2)).save_pretrained(tmp_path / "b")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    targets = LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False, task_type=task)
    model = get_peft_model(base, targets)
    model.save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = model(input_ids=sample_tokens()).logits
        assert torch.equal(again(input_ids=sample_tokens()).logits, expected)


def test_adapters_of_experts_beside_whole_routers_reload_and_merge_in_float32(tmp_path):
    """The page's section: experts by target_parameters, routers by modules_to_save."""
    model = swap_routers(tiny_model(FAMILIES["mixtral"]), L2RConfig(rank=2, heads=2))
    model.save_pretrained(tmp_path / "whole")
    adapter = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        modules_to_save=["gate"],
        init_lora_weights=False,  # adapters that change something
    )
    tuned = get_peft_model(load_pretrained(tmp_path / "whole"), adapter).eval()
    trained = [name for name, p in tuned.named_parameters() if p.requires_grad]
    assert any("experts" in name for name in trained) and any("gate" in name for name in trained)
    ids = torch.arange(16).view(1, 16)
    expected = tuned(ids).logits
    assert not torch.equal(expected, model.eval()(ids).logits)
    tuned.save_pretrained(tmp_path / "adapter")
    whole = load_pretrained(tmp_path / "whole", dtype=torch.float32)
    again = PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    assert torch.equal(again(ids).logits, expected)
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = load_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, expected, rtol=0, atol=1e-4)
