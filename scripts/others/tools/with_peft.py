"""PEFT: adapters on experts, attention and routers."""

from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from scripts.others.tools.rows import Row, row
from scripts.others.tools.subjects import IDS, Subject, largest_difference, logits

ROWS: list[Row] = []


def _trained(model: Any) -> None:
    """Three steps of SGD on everything that requires gradients."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()


def _merges(model: Any) -> None:
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-3)


def _moved(model: Any, part: str = "lora_B") -> bool:
    values = [p for n, p in model.named_parameters() if part in n]
    return bool(values) and all(bool(p.abs().max() > 0) for p in values)


@row(ROWS, "LoRA on all linear layers trains and merges")
def all_linear(subject: Subject) -> None:
    """Every adapter moves."""
    model = get_peft_model(subject.model(), LoraConfig(r=2, target_modules="all-linear"))
    _trained(model)
    assert _moved(model)
    _merges(model)


@row(ROWS, "LoRA on all linear layers adapts the experts")
def experts(subject: Subject) -> None:
    """An adapter inside the experts."""
    model = get_peft_model(subject.model(), LoraConfig(r=2, target_modules="all-linear"))
    assert any("lora_" in n and "experts" in n for n, _ in model.named_parameters())


@row(ROWS, "LoRA on the experts by `target_parameters` trains and merges")
def expert_parameters(subject: Subject) -> None:
    """The stacked matrices of the experts."""
    config = LoraConfig(
        r=2, target_modules=["q_proj", "o_proj"], target_parameters=["experts.down_proj"]
    )
    model = get_peft_model(subject.model(), config)
    _trained(model)
    assert _moved(model)
    _merges(model)


@row(ROWS, "LoRA on the router's weight by `target_parameters` trains and merges")
def router_parameters(subject: Subject) -> None:
    """The matrix that the input meets."""
    weight = f"{subject.router}.{subject.router_weight}"
    config = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], target_parameters=[weight])
    model = get_peft_model(subject.model(), config)
    _trained(model)
    moved = [p for n, p in model.named_parameters() if f".{subject.router}." in n and "lora_B" in n]
    assert moved and all(bool(p.abs().max() > 0) for p in moved)
    _merges(model)


@row(ROWS, "DoRA on attention trains and merges")
def dora(subject: Subject) -> None:
    """Weight-decomposed adapters."""
    targets = ["q_a_proj" if subject.family == "deepseek_v3" else "q_proj", "o_proj"]
    model = get_peft_model(subject.model(), LoraConfig(r=2, target_modules=targets, use_dora=True))
    _trained(model)
    _merges(model)


@row(ROWS, "routers as `modules_to_save`: trained, saved, opened, merged")
def saved_modules(subject: Subject) -> None:
    """The whole router beside adapters on attention."""
    config = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=[subject.router])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(subject.folder), config)
    _trained(model)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        base = AutoModelForCausalLM.from_pretrained(subject.folder)
        again = PeftModel.from_pretrained(base, folder)
        assert largest_difference(again, model) < 1e-6
    _merges(again)


@row(ROWS, "`AutoPeftModelForCausalLM` opens adapter and base")
def auto_peft(subject: Subject) -> None:
    """The base comes from its folder by PEFT itself."""
    base = AutoModelForCausalLM.from_pretrained(subject.folder)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["o_proj"]))
    _trained(model)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoPeftModelForCausalLM.from_pretrained(folder)
        assert largest_difference(again, model) < 1e-6


@row(ROWS, "`add_adapter` and `load_adapter` of transformers")
def adapters(subject: Subject) -> None:
    """transformers' own integration."""
    model = AutoModelForCausalLM.from_pretrained(subject.folder)
    model.add_adapter(LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False), "first")
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(subject.folder)
        again.load_adapter(folder, "first")
        assert largest_difference(again, model) < 1e-6
