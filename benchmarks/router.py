"""Router alone: forward and forward+backward of all forms, and one token at a time."""

import torch
from torch import Tensor, nn

from benchmarks.bench import Bench, main
from benchmarks.contenders import (
    STOCK,
    Contender,
    contenders,
    forward_step,
    is_correct,
    training_step,
)
from benchmarks.machine_speed import MachineSpeed, graphed, machine_speed
from l2r_lab.bench_settings import BenchSettings

_MEASURED = (
    "median_us", "low_us", "high_us", "ratio", "ratio_low", "ratio_high", "limit_us", "limited_by",
    "over_stock",
)  # fmt: skip


def run(settings: BenchSettings) -> Bench:
    """Time all routers at OLMoE's sizes (d = 2048, N = 64, k = 8)."""
    hidden, experts, top_k = (64, 16, 4) if settings.quick else (2048, 64, 8)
    batches = [8, 1] if settings.quick else [4096, 256, 1]
    modes = ("eager", "graph") if settings.device == "cuda" else ("eager",)
    bench = Bench(
        "router",
        settings,
        note="ratio: time over the fastest linear form's of the same group. limit: least time that "
        "this machine needs for the router's multiplications, or to read and write x and its "
        "gradient, whichever is longer. mode graph: CUDA graph replay, the device alone. fp32 "
        "parameters and arithmetic, except linear, transformers, in the dtype of x. over stock: "
        "over linear, transformers, which a swap replaces.",
    )
    speed = machine_speed(settings.device, seconds=settings.seconds / 4, clock=settings.clock)
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
                _group(bench, right, inputs, speed, phase=phase, mode=mode)
        for name in [name for name, good in correct.items() if not good]:
            bench.add(
                phase="-",
                mode="-",
                tokens=tokens,
                contender=name,
                correct=False,
                **dict.fromkeys(_MEASURED),
            )
    return bench


def _phases(tokens: int) -> tuple[str, ...]:
    """Phases that are timed for so many tokens; one token is inference, without backward."""
    return ("forward",) if tokens == 1 else ("forward", "forward+backward")


def _group(
    bench: Bench,
    entries: list[Contender],
    inputs: list[Tensor],
    speed: MachineSpeed,
    *,
    phase: str,
    mode: str,
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
    routers = {entry.name: entry.router for entry in entries}
    for name, times in found.items():
        seconds, limited_by = speed.limit(*_work(routers[name], inputs[0], phase))
        bench.add(
            phase=phase,
            mode=mode,
            tokens=inputs[0].shape[0],
            contender=name,
            correct=True,
            **times,
            limit_us=1e6 * seconds,
            limited_by=limited_by,
            over_stock=times["median_us"] / found[STOCK]["median_us"] if STOCK in found else None,
        )


def _work(router: nn.Module, x: Tensor, phase: str) -> tuple[float, float]:
    """Floating-point operations, and bytes of x, that a phase cannot do without.

    Every matrix is multiplied once per token, three times with the backward, which reads x again
    and writes its gradient.
    """
    passes = 1 if phase == "forward" else 3
    weights = sum(p.numel() for p in router.parameters() if p.dim() > 1)
    return 2.0 * passes * len(x) * weights, passes * x.nbytes


def _inputs(tokens: int, hidden: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Make a few input sets, so that repeated steps do not read a warm cache alone."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(tokens, hidden, generator=generator).to(device, dtype)
        for _ in range(4 if device == "cuda" else 2)
    ]


if __name__ == "__main__":
    raise SystemExit(main("router", run))
