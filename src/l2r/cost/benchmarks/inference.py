"""Prefill and decode of whole models, and the router's share of the time (paper, Appendix)."""

from typing import Any

import torch
from torch import Tensor, nn

from l2r.cost.benchmarks.language_models import agrees, models, sizes
from l2r.cost.benchmarks.results import Bench, BenchSettings
from l2r.cost.benchmarks.timing import Step, Timing, measure
from l2r.kernels.dispatch import implementation


def run(settings: BenchSettings) -> Bench:
    """Batch 1: prefill of a prompt, then one token at a time with a dynamic cache."""
    both = settings.device == "cpu" and not settings.quick
    chosen = ("small", "layer") if both else ("small",)
    bench = Bench(
        "inference",
        settings,
        groups=2 * len(chosen),  # phases of a size
        note="ratio: time over the stock model's. over linear: over our own with the linear "
        "router. router share: time of all routers alone over the step's. plain: the router "
        "without fused code. layer: one layer of OLMoE's own size.",
    )
    for size in chosen:
        _size(bench, size)
    return bench


def _size(bench: Bench, size: str) -> None:
    settings = bench.settings
    length = 16 if settings.quick else 2048 if settings.device == "cuda" else 128
    generator = torch.Generator().manual_seed(0)
    shape = sizes(settings, size)
    prompt = torch.randint(2, shape["vocab_size"], (1, length), generator=generator)
    prompt = prompt.to(settings.device)
    by_name = {name: model.eval() for name, model in models(settings, size).items()}
    with torch.no_grad():
        expected = by_name["stock"](prompt[:, :16]).logits
        if not agrees(by_name["l2r, linear"](prompt[:, :16]).logits, expected, settings):
            return  # ours with the stock weights must be the stock model
    phases = {"prefill": (_prefill, prompt), "decode": (_decode, prompt)}
    for phase, (make, tokens) in phases.items():
        steps = {name: make(model, tokens) for name, model in by_name.items()}
        plain = make(by_name["l2r, l2r_sips H16"], tokens)
        steps["l2r, l2r_sips H16, plain"] = _unfused(plain)
        times = bench.measure(steps, "stock", f"{size}, {phase}", share=2)
        count = length if phase == "prefill" else 1
        for name, time in times.items():
            routers = _share(by_name, name, count, shape["hidden_size"], settings)
            bench.add(
                size=size,
                phase=phase,
                contender=name,
                **overhead(time, count, stock=times["stock"], linear=times["l2r, linear"]),
                router_share=routers / time.median,
            )


def overhead(time: Timing, tokens: int, *, stock: Timing, linear: Timing) -> dict[str, float]:
    """Columns of the paper's inference table for a step of ``tokens``, and the ratios."""
    return {
        "latency_ms": 1e3 * time.median,
        "low_ms": 1e3 * time.low,
        "high_ms": 1e3 * time.high,
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
    return measure({name: chosen}, device=settings.device, seconds=seconds, rounds=3)[name].median
