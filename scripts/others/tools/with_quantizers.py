"""torchao and bitsandbytes: experts and attention in eight or four bits, routers in float."""

from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from scripts.others.tools.rows import Row, row
from scripts.others.tools.subjects import IDS, Subject, in_routers, largest_difference, logits

ROWS: list[Row] = []


def _routers_are_float(subject: Subject, model: object) -> None:
    if subject.kind != "stock":
        assert all(p.dtype == torch.float32 for _, p in in_routers(model))
    assert torch.isfinite(logits(model).float()).all()


@row(ROWS, "torchao `quantize_` to int8 weights; routers stay float32")
def ao(subject: Subject) -> None:
    """In memory."""
    model = subject.model()
    quantize_(model, Int8WeightOnlyConfig())
    _routers_are_float(subject, model)


@row(ROWS, "`TorchAoConfig`: opened in int8, saved, opened again")
def ao_saved(subject: Subject) -> None:
    """Through transformers and disk."""
    config = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(subject.folder, quantization_config=config)
    _routers_are_float(subject, model)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert largest_difference(AutoModelForCausalLM.from_pretrained(folder), model) < 1e-5


def _bits(bits: int) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)


@row(ROWS, "bitsandbytes in 4 bits: opened, saved, opened again")
def four(subject: Subject) -> None:
    """On a CPU."""
    model = AutoModelForCausalLM.from_pretrained(subject.folder, quantization_config=_bits(4))
    _routers_are_float(subject, model)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert largest_difference(AutoModelForCausalLM.from_pretrained(folder), model) < 1e-5


@row(ROWS, "bitsandbytes in 8 bits")
def eight(subject: Subject) -> None:
    """On a CPU."""
    model = AutoModelForCausalLM.from_pretrained(subject.folder, quantization_config=_bits(8))
    _routers_are_float(subject, model)


@row(ROWS, "a QLoRA step")
def qlora(subject: Subject) -> None:
    """Adapters on a model in 4 bits."""
    model = AutoModelForCausalLM.from_pretrained(subject.folder, quantization_config=_bits(4))
    model = get_peft_model(
        prepare_model_for_kbit_training(model), LoraConfig(r=2, target_modules=["o_proj"])
    )
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    gradients = [p.grad for n, p in model.named_parameters() if "lora_B" in n]
    assert gradients and all(g is not None and g.abs().max() > 0 for g in gradients)
