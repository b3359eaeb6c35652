"""Prefill and decode of whole models, and the router's share of the time (paper, Table 10).

transformers' OLMoE and ours compete, with the same sizes and weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.kernels.dispatch import implementation
from l2r.machine import available_memory
from l2r_lab.bench_settings import BenchSettings
from l2r_lab.timing import Step, Timing, measure

NOTE = (
    "ratio: time over the stock model's. over linear: over our own with the linear router. router "
    "share: time of all routers alone over the step's. plain: the router without fused code. "
    "Batch 1; a decode step is one token after the prompt."
)
MODEL_SIZES = ("paper", "layer", "small", "tiny")

_TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_experts": 64, "num_experts_per_tok": 8,
}  # fmt: skip
_SMALL_CUDA = {
    "vocab_size": 50304, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
}  # fmt: skip
_PAPER = {
    "vocab_size": 50280, "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
}  # fmt: skip
_LAYER = {**_PAPER, "vocab_size": 4096, "num_hidden_layers": 1}
_SPECIAL = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}

# The paper's name -> router configuration of ours; the stock model has its own.
ROUTERS: dict[str, dict[str, Any]] = {
    "Linear": {"kind": "linear"},
    "L2R (Dot)-H1": {"kind": "l2r_dot", "rank": 2, "heads": 1},
    "L2R (SIPS)-H1": {"kind": "l2r_sips", "rank": 2, "heads": 1},
    "L2R (SIPS)-H16": {"kind": "l2r_sips", "rank": 2, "heads": 16},
}
_PLAIN = "L2R (SIPS)-H16, plain"


def sizes(settings: BenchSettings, size: str = "small") -> dict[str, Any]:
    """Sizes of OLMoE: the paper's, one such layer, or less in its proportions."""
    small = _SMALL_CUDA if settings.device == "cuda" else _SMALL
    chosen = {"paper": _PAPER, "layer": _LAYER, "small": small, "tiny": _TINY}[size]
    return {**chosen, **_SPECIAL}


def prompt_length(settings: BenchSettings, size: str) -> int:
    """Tokens of the prompt: 4,096 as in every row of the paper's table, less for less."""
    if size == "paper":
        return 4096
    return 16 if size == "tiny" else 2048 if settings.device == "cuda" else 128


def _ours(
    settings: BenchSettings, router: dict[str, Any], base: Any, shape: dict[str, Any]
) -> nn.Module:
    """Our OLMoE with a router and our dispatch; all other weights are the tensors of ``base``."""
    from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, register_experts

    with torch.device("meta"):
        model = L2rOlmoeForCausalLM(L2rOlmoeConfig(**shape, router=router))
    model.model.rotary_emb = base.model.rotary_emb
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.mlp.gate.to_empty(device=settings.device)
        layer.mlp.gate.reset_parameters()
    model.set_experts_implementation(register_experts())
    missing, unexpected = model.load_state_dict(base.state_dict(), strict=False, assign=True)
    strange = [name for name in [*missing, *unexpected] if ".gate." not in name]
    assert not strange, strange
    return model.to(settings.device, settings.dtype)


def models(settings: BenchSettings, size: str = "small") -> dict[str, nn.Module]:
    """All contenders by name, first transformers' OLMoE with its default experts (grouped_mm).

    They share all weights but their routers'. Raises ValueError where memory is too small.
    """
    from l2r.hf.models import stock_olmoe

    shape = sizes(settings, size)
    _check_memory(settings, size, shape)
    torch.manual_seed(0)
    with torch.device(settings.device):
        base = stock_olmoe(**shape).to(settings.dtype)
    ours = {name: _ours(settings, router, base, shape) for name, router in ROUTERS.items()}
    return {"stock": base, **ours}


def _check_memory(settings: BenchSettings, size: str, shape: Mapping[str, int]) -> None:
    """Refuse a model whose float32 weights, in which it is drawn, are more than what is free."""
    width, experts = shape["hidden_size"], shape["num_experts"]
    layer = 3 * experts * width * shape["intermediate_size"] + 4 * width**2
    needed = 4 * (shape["num_hidden_layers"] * layer + 2 * shape["vocab_size"] * width)
    on_gpu = settings.device == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else available_memory()
    if needed > free:
        raise InputError(
            f"size must fit into memory: {size} needs {needed / 1e9:.1f} GB on {settings.device}, "
            f"{free / 1e9:.1f} GB are free; --size layer, small and tiny need less"
        )


def agrees(logits: torch.Tensor, expected: torch.Tensor, settings: BenchSettings) -> bool:
    """Tell whether two tensors of logits are equal up to the dtype's rounding in the layers."""
    gap = (logits.float() - expected.float()).abs().max() / expected.float().abs().max()
    return bool(gap <= (0.1 if settings.device == "cuda" else 1e-3))


def time_inference(settings: BenchSettings, size: str = "paper") -> list[dict[str, Any]]:
    """Batch 1: prefill of a prompt, then one token at a time with a dynamic cache.

    Raises ValueError for an unknown size, and where memory is too small.
    """
    if size not in MODEL_SIZES:
        raise InputError(f"size must be one of {', '.join(MODEL_SIZES)}; got {size}")
    length = prompt_length(settings, size)
    shape = sizes(settings, size)
    by_name = {name: model.eval() for name, model in models(settings, size).items()}
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(2, shape["vocab_size"], (1, length), generator=generator)
    prompt = prompt.to(settings.device)
    with torch.no_grad():
        expected = by_name["stock"](prompt[:, :16]).logits
        if not agrees(by_name["Linear"](prompt[:, :16]).logits, expected, settings):
            return []  # ours with the stock weights must be the stock model
    records: list[dict[str, Any]] = []
    phases = {"prefill": (_prefill, prompt), "decode": (_decode, prompt)}
    for phase, (make, tokens) in phases.items():
        steps = {name: make(model, tokens) for name, model in by_name.items()}
        steps[_PLAIN] = _unfused(make(by_name[_PLAIN.removesuffix(", plain")], tokens))
        times = measure(steps, seconds=2 * settings.seconds, clock=settings.clock)
        count = length if phase == "prefill" else 1
        for name, time in times.items():
            routers = _share(by_name, name, count, shape["hidden_size"], settings)
            record = dict(
                size=size,
                batch=1,
                prompt=length,
                phase=phase,
                contender=name,
                steps=time.steps,
                **overhead(time, count, stock=times["stock"], linear=times["Linear"]),
                router_share=routers / time.median,
            )
            records.append(record)
    return records


def overhead(time: Timing, tokens: int, *, stock: Timing, linear: Timing) -> dict[str, float]:
    """Columns of the paper's inference table for a step of ``tokens``, and the ratios."""
    return {
        "latency_ms": 1e3 * time.median,
        "low_ms": 1e3 * min(time.turns),
        "high_ms": 1e3 * max(time.turns),
        "tokens_per_second": tokens / time.median,
        **time.over(stock),
        "over_linear": time.median / linear.median,
    }


def _prefill(model: Any, prompt: Tensor) -> Step:
    def step(_: int) -> object:
        with torch.no_grad():
            return model(prompt, use_cache=True, logits_to_keep=1)

    return step


def _decode(model: Any, prompt: Tensor) -> Step:
    """One token after the prompt; the cache is cut back, so that every step is the same."""
    from l2r.hf.models import CACHE

    with torch.no_grad():
        cache = model(prompt, use_cache=True, logits_to_keep=1)[CACHE]
    token = prompt[:, :1]

    def step(_: int) -> object:
        with torch.no_grad():
            logits = model(token, **{CACHE: cache}, use_cache=True).logits
        cache.crop(-1)
        return logits

    return step


def _unfused(step: Step) -> Step:
    def plain(number: int) -> object:
        with implementation("plain"):
            return step(number)

    return plain


def _share(
    by_name: dict[str, Any], name: str, tokens: int, hidden: int, settings: BenchSettings
) -> float:
    """Seconds of all routers of a model alone, on random hidden states."""
    model = by_name[name.removesuffix(", plain")]
    gates: list[nn.Module] = [layer.mlp.gate for layer in model.model.layers]
    dtype = next(model.parameters()).dtype
    x = torch.randn(tokens, hidden, device=settings.device, dtype=dtype)

    def step(_: int) -> object:
        with torch.no_grad():
            return [gate(x) for gate in gates]

    chosen = _unfused(step) if name.endswith("plain") else step
    seconds = min(0.3, settings.seconds)
    return measure({name: chosen}, seconds=seconds, rounds=3)[name].median
