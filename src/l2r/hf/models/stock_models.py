"""transformers' own OLMoE and Trainer, unchanged: what benchmarks compare with."""

from typing import Any

from torch import nn
from transformers import OlmoeConfig, OlmoeForCausalLM, Trainer, TrainingArguments


def stock_olmoe(**sizes: Any) -> OlmoeForCausalLM:
    """Build transformers' own OLMoE; ``sizes`` are fields of OlmoeConfig."""
    return OlmoeForCausalLM(OlmoeConfig(**sizes))


def one_layer(
    *, hidden_size: int, num_experts: int, top_k: int, intermediate_size: int = 8
) -> OlmoeForCausalLM:
    """Build transformers' OLMoE with one layer and few words, for its experts or its router."""
    return stock_olmoe(
        vocab_size=8,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )


def stock_trainer(model: nn.Module, folder: str, *, cpu: bool) -> Trainer:
    """Build transformers' Trainer with its defaults, writing nothing."""
    options = TrainingArguments(
        output_dir=folder, report_to=[], save_strategy="no", use_cpu=cpu, disable_tqdm=True
    )
    return Trainer(model=model, args=options)
