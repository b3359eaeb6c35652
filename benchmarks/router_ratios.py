"""Ratios of router time at the ranks that the evidence prefers: own and swapped, fp32 and bf16.

    OMP_NUM_THREADS=1 python -m benchmarks.router_ratios > results/router-ratios-1-thread.md
    python -m benchmarks.router_ratios --device cuda --seconds 1 > router-ratios.md

d = 2048, k = 8. Three tables: every router over the fastest linear one in fp32; inputs in bf16,
weights in fp32 or bf16, over the router of transformers' OLMoE in bf16, whose product is in bf16
too; one token. All contenders of a cell take turns, and one that is wrong against float64 gets no
number. Run it once per number of threads on a quiet machine: some eight minutes each. On a GPU
steps are replays of CUDA graphs, the time on the device alone; launches are in the tables of
``python -m benchmarks.router --device cuda``.
"""

import argparse
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.contenders import (
    STOCK,
    Contender,
    contenders,
    forward_step,
    is_correct,
    training_step,
)
from benchmarks.machine_speed import graphed
from l2r.hf.models import one_layer
from l2r.hf.swap import replace_routers
from l2r.routers import make_config
from l2r_lab.bench_settings import BenchSettings
from l2r_lab.timing import Step, Timing, environment, measure

HIDDEN, CHOSEN, TOKENS = 2048, 8, 4096
_BASE = "base, us"
EXPERTS = (64, 256, 1024)
SETTINGS = {
    f"L2R r{rank} H{heads}": (rank, heads)
    for rank, heads in ((2, 16), (8, 1), (8, 4), (16, 1), (16, 4), (32, 1), (32, 4))
}


def entries_of(
    experts: int, settings: Sequence[str], dtype: torch.dtype, device: str
) -> list[Contender]:
    """Routers of these sizes, own and swapped, with linear, X-MoE and transformers' own."""
    routers: dict[str, tuple[str, dict[str, Any]]] = {
        "linear": ("linear", {}),
        "X-MoE": ("xmoe", {}),
    }
    for label in settings:
        rank, heads = SETTINGS[label]
        routers[label] = ("l2r_sips", {"rank": rank, "heads": heads})
    every_form = contenders(
        BenchSettings(device), hidden=HIDDEN, experts=experts, top_k=CHOSEN, routers=routers
    )
    entries = [
        entry
        for entry in every_form
        if entry.name != STOCK and (entry.form == "fused" or entry.name == "linear, plain")
    ]
    for entry in entries:
        entry.name = entry.name.removesuffix(", fused")
    sizes = {"hidden_size": HIDDEN, "num_experts": experts, "top_k": CHOSEN}
    torch.manual_seed(0)
    stock = one_layer(**sizes).model.layers[0].mlp.gate.to(device, dtype)
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    entries.append(Contender(STOCK, stock, "fused", tolerance=tolerance))
    for label in settings:
        rank, heads = SETTINGS[label]
        model = replace_routers(one_layer(**sizes), make_config("l2r_sips", rank=rank, heads=heads))
        router = model.model.layers[0].mlp.gate.to(device)
        entries.append(Contender(f"{label}, swapped", router, "fused"))
        if dtype == torch.bfloat16:
            own = next(entry.router for entry in entries if entry.name == label)
            narrow = copy.deepcopy(own).to(dtype)
            name = f"{label}, weights in bf16"
            entries.append(Contender(name, narrow, "fused", tolerance=tolerance))
    return entries


def times(entries: Sequence[Contender], x: Tensor, phase: str, seconds: float) -> dict[str, Timing]:
    """Time of every contender that is right."""
    steps: dict[str, Step] = {}
    for entry in entries:
        if not is_correct(entry, x):
            continue
        if phase == "forward":
            steps[entry.name] = forward_step(entry.call, [x])
        else:
            steps[entry.name] = training_step(entry.call, entry.router.parameters(), [x])
    if x.is_cuda:
        steps = {name: graphed(step) for name, step in steps.items()}
    clock = "cpu" if torch.get_num_threads() == 1 and not x.is_cuda else "wall"
    return measure(steps, seconds=seconds, rounds=7, clock=clock)


def ratios(timings: Mapping[str, Timing], bases: Sequence[str]) -> dict[str, str]:
    """Ratio to the fastest base, turn by turn: median and range; and the base's median time."""
    base = [min(turns) for turns in zip(*(timings[name].turns for name in bases), strict=True)]
    cells = {_BASE: f"{1e6 * sorted(base)[len(base) // 2]:.1f}"}
    for name, timing in timings.items():
        values = sorted(t / b for t, b in zip(timing.turns, base, strict=True))
        cells[name] = f"{values[len(values) // 2]:.2f} ({values[0]:.2f}-{values[-1]:.2f})"
    return cells


def table(title: str, columns: Mapping[str, Mapping[str, str]], names: Sequence[str]) -> None:
    """Print a Markdown table; a contender that was wrong has no number."""
    print(f"\n## {title}\n\n| router | {' | '.join(columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for name in (_BASE, *names):
        print(f"| {name} | {' | '.join(cells.get(name, '') for cells in columns.values())} |")


def main() -> None:
    """Measure and print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="for all contenders of a cell")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    first = "numbers of experts of the first table"
    parser.add_argument("--experts", type=int, nargs="*", default=EXPERTS, help=first)
    options = parser.parse_args()
    seconds, most, device = options.seconds, options.tokens, options.device
    machine = environment()
    if device == "cpu":
        versions = f"{machine['processor']}, torch {machine['torch']}, {machine['threads']} threads"
        print(f"{versions}, ours in {machine['cpu_routers']};")
        print("median of 7 turns and range; processor time with one thread, else wall time.")
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__};")
        print("median of 7 turns and range; replays of CUDA graphs.")

    names: list[str] = []
    columns: dict[str, dict[str, str]] = {}
    for experts in options.experts:
        entries = entries_of(experts, list(SETTINGS), torch.float32, device)
        names = [entry.name for entry in entries]
        for phase in ("forward", "forward+backward"):
            timings = times(entries, torch.randn(most, HIDDEN, device=device), phase, seconds)
            label = f"N {experts}, {'f+b' if phase != 'forward' else phase}"
            columns[label] = ratios(timings, ["linear", "linear, plain", STOCK])
    table(f"fp32, {most:,} tokens, over the fastest linear router", columns, names)

    columns = {}
    few = ["L2R r2 H16", "L2R r8 H1", "L2R r8 H4"]
    entries = entries_of(64, [*few, "L2R r16 H1", "L2R r32 H1"], torch.bfloat16, device)
    for tokens in (1, 16, 256, 1024, most):
        for phase in ("forward", "f+b") if tokens > 1 else ("forward",):
            x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
            columns[f"T {tokens}, {phase}"] = ratios(times(entries, x, phase, seconds / 3), [STOCK])
    table(
        "bf16 inputs, N 64, over transformers' router in bf16", columns, [e.name for e in entries]
    )

    columns = {}
    for experts in (64, 256):
        entries = entries_of(experts, few, torch.float32, device)
        timings = times(entries, torch.randn(1, HIDDEN, device=device), "forward", seconds / 3)
        columns[f"N {experts}"] = ratios(timings, [STOCK])
    table("fp32, one token, over transformers' router", columns, [e.name for e in entries])


if __name__ == "__main__":
    main()
