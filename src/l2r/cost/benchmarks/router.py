"""Router alone: forward and forward+backward of all forms, and one token at a time."""

import torch
from torch import Tensor

from l2r.cost.benchmarks.contenders import (
    STOCK,
    Contender,
    contenders,
    forward_step,
    is_correct,
    training_step,
)
from l2r.cost.benchmarks.results import Bench, BenchSettings
from l2r.cost.benchmarks.timing import graphed


def run(settings: BenchSettings) -> Bench:
    """Time all routers at OLMoE's sizes (d = 2048, N = 64, k = 8)."""
    hidden, experts, top_k = (64, 16, 4) if settings.quick else (2048, 64, 8)
    batches = [8, 1] if settings.quick else [4096, 256, 1]
    modes = ("eager", "graph") if settings.device == "cuda" else ("eager",)
    bench = Bench(
        "router",
        settings,
        groups=sum(len(_phases(tokens)) for tokens in batches) * len(modes),
        note="ratio: median over the fastest linear form of the same group. mode graph: CUDA graph "
        "replay, the device alone. fp32 parameters and arithmetic, except linear, transformers, "
        "in the dtype of x. over stock: over linear, transformers, which a swap replaces.",
    )
    entries = contenders(
        settings,
        hidden=hidden,
        experts=experts,
        top_k=top_k,
        compiled=settings.compiled,
        swapped=True,
    )
    for tokens in batches:
        inputs = _inputs(tokens, hidden, settings.device, settings.dtype)
        torch.compiler.reset()
        for entry in entries:
            entry.forget()
        correct = {entry.name: is_correct(entry, inputs[0]) for entry in entries}
        right = [entry for entry in entries if correct[entry.name]]
        if settings.device == "cuda" and tokens != max(batches):
            right = [entry for entry in right if entry.form != "compiled"]
        for phase in _phases(tokens):
            for mode in modes:
                _group(bench, right, inputs, phase=phase, mode=mode)
        for name in [name for name, good in correct.items() if not good]:
            none = dict.fromkeys(("median_us", "low_us", "high_us", "ratio", "over_stock"))
            bench.add(phase="-", mode="-", tokens=tokens, contender=name, correct=False, **none)
    return bench


def _phases(tokens: int) -> tuple[str, ...]:
    """Phases that are timed for so many tokens; one token is inference, without backward."""
    return ("forward",) if tokens == 1 else ("forward", "forward+backward")


def _group(
    bench: Bench, entries: list[Contender], inputs: list[Tensor], *, phase: str, mode: str
) -> None:
    """Time one phase of all correct contenders against each other."""
    if mode == "graph":  # torch.compile has graphs of its own
        entries = [entry for entry in entries if entry.form != "compiled"]
    steps = {
        e.name: forward_step(e.call, inputs)
        if phase == "forward"
        else training_step(e.call, e.router.parameters(), inputs)
        for e in entries
    }
    if mode == "graph":
        steps = {name: graphed(step) for name, step in steps.items()}
    found = bench.compare(steps, "linear", "us", f"{phase}, {mode}, {inputs[0].shape[0]} tokens")
    for name, times in found.items():
        bench.add(
            phase=phase,
            mode=mode,
            tokens=inputs[0].shape[0],
            contender=name,
            correct=True,
            **times,
            over_stock=times["median_us"] / found[STOCK]["median_us"] if STOCK in found else None,
        )


def _inputs(tokens: int, hidden: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """A few input sets, so that repeated steps do not read a warm cache alone."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(tokens, hidden, generator=generator).to(device, dtype)
        for _ in range(4 if device == "cuda" else 2)
    ]
