"""Tiny language models: with our routers, and stock Hugging Face ones."""

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "pad_token_id": 1,
    "eos_token_id": 0,
}


def ours(kind="l2r_sips", **options):
    torch.manual_seed(0)
    return L2rOlmoeForCausalLM(L2rOlmoeConfig(router={"kind": kind, **options}, **SIZES)).eval()


def stock():
    torch.manual_seed(0)
    return OlmoeForCausalLM(OlmoeConfig(**SIZES)).eval()


def batches(count=3, *, rows=4, length=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(2, 64, (rows, length), generator=generator),
            "domain": torch.arange(rows) % 2,
        }
        for _ in range(count)
    ]
