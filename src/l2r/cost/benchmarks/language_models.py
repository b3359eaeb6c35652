"""The language models that compete: transformers' OLMoE and ours, with the same sizes."""

from typing import Any

import torch
from torch import nn

from l2r.cost.benchmarks.bench_settings import BenchSettings

_QUICK = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_CPU = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_experts": 64, "num_experts_per_tok": 8,
}  # fmt: skip
_LAYER = {  # one layer as in OLMoE-1B-7B, with few words
    "vocab_size": 4096, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 1,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
}  # fmt: skip
_CUDA = {
    "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
}  # fmt: skip
_SPECIAL = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}

# name -> router configuration of ours; the stock model has its own
ROUTERS: dict[str, dict[str, Any]] = {
    "l2r, linear": {"kind": "linear"},
    "l2r, l2r_sips H16": {"kind": "l2r_sips", "rank": 2, "heads": 16},
}


def sizes(settings: BenchSettings, size: str = "small") -> dict[str, Any]:
    """Model sizes for a device: OLMoE's proportions, small enough for a quick benchmark.

    ``size="layer"``: a single layer of OLMoE's own.
    """
    if size == "layer":
        return {**_LAYER, **_SPECIAL}
    chosen = _QUICK if settings.quick else _CUDA if settings.device == "cuda" else _CPU
    return {**chosen, **_SPECIAL}


def _ours(
    settings: BenchSettings, router: dict[str, Any], weights: nn.Module, size: str
) -> nn.Module:
    """Our OLMoE with a router and our dispatch; other weights as in ``weights``."""
    from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, register_experts

    torch.manual_seed(0)
    config = L2rOlmoeConfig(**sizes(settings, size), router=router)
    model = L2rOlmoeForCausalLM(config)
    model.set_experts_implementation(register_experts())
    missing, unexpected = model.load_state_dict(weights.state_dict(), strict=False)
    strange = [name for name in [*missing, *unexpected] if ".gate." not in name]
    assert not strange, strange
    return model.to(settings.device, settings.dtype)


def models(settings: BenchSettings, size: str = "small") -> dict[str, nn.Module]:
    """All contenders by name, first transformers' OLMoE with its default experts (grouped_mm)."""
    from l2r.hf.models import stock_olmoe

    torch.manual_seed(0)
    base = stock_olmoe(**sizes(settings, size)).to(settings.device, settings.dtype)
    return {"stock": base, **{name: _ours(settings, r, base, size) for name, r in ROUTERS.items()}}


def agrees(logits: torch.Tensor, expected: torch.Tensor, settings: BenchSettings) -> bool:
    """Whether two logits tensors are the same up to the dtype's rounding through the layers."""
    gap = (logits.float() - expected.float()).abs().max() / expected.float().abs().max()
    return bool(gap <= (0.1 if settings.device == "cuda" else 1e-3))
