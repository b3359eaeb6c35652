"""Unchanged transformers parts that benchmarks compare with."""

from typing import Any

from torch import nn
from transformers import OlmoeConfig, OlmoeForCausalLM, Trainer, TrainingArguments

from l2r.routers import RouterConfig
from l2r.swap.swap import swap_routers


def stock_olmoe(**sizes: Any) -> OlmoeForCausalLM:
    """transformers' own OLMoE; ``sizes`` are fields of OlmoeConfig."""
    return OlmoeForCausalLM(OlmoeConfig(**sizes))


def stock_experts(
    *, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int
) -> nn.Module:
    """The stacked experts of one layer of transformers' OLMoE."""
    model = _one_layer(hidden_size, intermediate_size, num_experts, top_k)
    experts: nn.Module = model.model.layers[0].mlp.experts
    return experts


def stock_router(*, hidden_size: int, num_experts: int, top_k: int) -> nn.Module:
    """The router of one layer of transformers' OLMoE."""
    router: nn.Module = _one_layer(hidden_size, 8, num_experts, top_k).model.layers[0].mlp.gate
    return router


def swapped_router(
    config: RouterConfig, *, hidden_size: int, num_experts: int, top_k: int
) -> nn.Module:
    """The router that ``swap_routers`` puts into a layer of transformers' OLMoE."""
    model = swap_routers(_one_layer(hidden_size, 8, num_experts, top_k), config)
    router: nn.Module = model.model.layers[0].mlp.gate
    return router


def _one_layer(
    hidden_size: int, intermediate_size: int, num_experts: int, top_k: int
) -> OlmoeForCausalLM:
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
    """transformers' Trainer with its defaults, writing nothing."""
    options = TrainingArguments(
        output_dir=folder, report_to=[], save_strategy="no", use_cpu=cpu, disable_tqdm=True
    )
    return Trainer(model=model, args=options)
