"""Peak extra memory of the router's forward and backward; a count, the same in every run."""

from collections.abc import Callable

import torch

from benchmarks.bench import Bench, main
from benchmarks.contenders import contenders, is_correct, training_step
from l2r_lab.bench_settings import BenchSettings
from l2r_lab.timing import Step


def run(settings: BenchSettings) -> Bench:
    """Peak of the live bytes above those of the inputs and parameters, gradients included."""
    bench = Bench(
        "memory", settings, note="ratio: over the smallest linear form; gradients of x included."
    )
    hidden, experts, tokens = (64, 16, 64) if settings.quick else (2048, 64, 4096)
    x = torch.randn(tokens, hidden, device=settings.device, dtype=settings.dtype)
    peaks = {}
    top_k = 4 if settings.quick else 8
    entries = contenders(settings, hidden=hidden, experts=experts, top_k=top_k)
    for entry in entries:
        if is_correct(entry, x):
            step = training_step(entry.call, entry.router.parameters(), [x])
            peaks[entry.name] = peak_bytes(step, settings.device)
    base = min(peak for name, peak in peaks.items() if name.startswith("linear"))
    for name, peak in peaks.items():
        bench.add(contender=name, tokens=tokens, peak_mib=peak / 2**20, ratio=peak / base)
    return bench


def peak_bytes(step: Step, device: str) -> int:
    """Most bytes alive at once during one step, above those alive before it."""
    step(0)
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(0)
        return torch.cuda.max_memory_allocated() - before
    return traced_peak(lambda: step(0))


def traced_peak(step: Callable[[], object]) -> int:
    """Most bytes that torch's allocator for the CPU had out at once while ``step`` ran."""
    activity = [torch.profiler.ProfilerActivity.CPU]
    # acc_events: there is one cycle, and torch 2.10 warns that the events of others are dropped.
    with torch.profiler.profile(
        activities=activity, profile_memory=True, acc_events=True
    ) as profile:
        step()
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


if __name__ == "__main__":
    raise SystemExit(main("memory", run))
