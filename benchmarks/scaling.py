"""How time and memory grow with T, N, H, r and d, one size at a time."""

import torch

from benchmarks.bench import Bench, main
from benchmarks.contenders import contenders, forward_step, is_correct, training_step
from benchmarks.memory import peak_bytes
from l2r_lab.bench_settings import BenchSettings

_START = {"tokens": 2048, "experts": 64, "heads": 4, "rank": 2, "hidden": 1024}
_SWEEPS = {
    "tokens": [1, 16, 256, 2048, 8192],
    "experts": [64, 256, 1024, 4096],
    "heads": [1, 4, 16, 64],
    "rank": [1, 2, 4, 16, 64],
    "hidden": [256, 1024, 4096],
}


def run(settings: BenchSettings) -> Bench:
    """Linear against l2r_sips, fused; the other sizes stay at T 2048, N 64, H 4, r 2, d 1024."""
    sweeps = {axis: values[:2] if settings.quick else values for axis, values in _SWEEPS.items()}
    bench = Bench(
        "scaling",
        settings,
        note="ratio: time over the fastest linear form's.",
    )
    for axis, values in sweeps.items():
        for value in values:
            start = {**_START, "tokens": 16, "hidden": 64} if settings.quick else _START
            _point(bench, axis, {**start, axis: value})
    return bench


def _point(bench: Bench, axis: str, sizes: dict[str, int]) -> None:
    settings = bench.settings
    routers = {
        "linear": ("linear", {}),
        "l2r_sips": ("l2r_sips", {"heads": sizes["heads"], "rank": sizes["rank"]}),
    }
    hidden, experts = sizes["hidden"], sizes["experts"]
    entries = contenders(settings, hidden=hidden, experts=experts, top_k=8, routers=routers)
    x = torch.randn(sizes["tokens"], hidden, device=settings.device, dtype=settings.dtype)
    entries = [
        entry for entry in entries if entry.name != "l2r_sips, plain" and is_correct(entry, x)
    ]
    phases = {
        "forward": {e.name: forward_step(e.call, [x]) for e in entries},
        "forward+backward": {
            e.name: training_step(e.call, e.router.parameters(), [x]) for e in entries
        },
    }
    for phase, steps in phases.items():
        group = f"{axis} {sizes[axis]}, {phase}"
        times_by_name = bench.compare(steps, "linear", "us", group, share=0.25, rounds=5)
        for name, times in times_by_name.items():
            bench.add(
                axis=axis,
                value=sizes[axis],
                phase=phase,
                contender=name,
                **times,
                peak_mib=peak_bytes(steps[name], settings.device) / 2**20,
            )


if __name__ == "__main__":
    raise SystemExit(main("scaling", run))
