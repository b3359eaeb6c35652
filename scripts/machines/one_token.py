"""Time a router's call for one token while a model generates: stock, swapped and our own model.

    OMP_NUM_THREADS=1 python scripts/machines/one_token.py [--against OTHER/src] [--turns 9]
    L2R_CPU_MARCH=x86-64-v3 ...   C++ for AVX2 on a processor that has AVX-512

Stock Mixtral, the same model with swapped routers, stock OLMoE and L2rOlmoe generate in turns, in
one process with one thread and without a capture. A call is timed from the block's side: hooks of
torch, the router and the tuple that it returns. Printed: median time of a call in us, and the
ratio to the stock router of its family, turn by turn: median and middle half. ``--against`` runs
another source tree in turns with this one, a process each.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2] / "src"
SIZES = ((8, 2), (64, 8))  # experts and chosen: Mixtral's and OLMoE's
STOCK = {"mixtral, swapped": "mixtral", "l2r_olmoe": "olmoe"}  # whose router is the base


def models(experts: int, chosen: int, hidden: int) -> dict[str, Any]:
    """Small models of two layers that differ in their routers."""
    import warnings

    import torch
    from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM

    import l2r

    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "num_experts_per_tok": chosen,
    }
    mixtral = {**common, "num_local_experts": experts}
    olmoe = {**common, "num_experts": experts, "eos_token_id": None, "pad_token_id": None}
    router = {"kind": "l2r_sips", "rank": 8, "heads": 4, "gamma": 4.0}
    made: dict[str, Any] = {}
    torch.manual_seed(0)
    made["mixtral"] = MixtralForCausalLM(MixtralConfig(**mixtral))
    made["mixtral, swapped"] = MixtralForCausalLM(MixtralConfig(**mixtral))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the new routers are untrained
        l2r.swap_routers(made["mixtral, swapped"])
    made["olmoe"] = OlmoeForCausalLM(OlmoeConfig(**olmoe))
    own = l2r.L2rOlmoeConfig(**olmoe, router=router)
    made["l2r_olmoe"] = l2r.L2rOlmoeForCausalLM(own)
    return {name: model.eval() for name, model in made.items()}


def clocked(model: Any) -> list[int]:
    """Put a clock around every router's call; the times in ns, of one token alone."""
    import torch

    times: list[int] = []

    class Clock(torch.nn.Module):
        def __init__(self, router: torch.nn.Module) -> None:
            super().__init__()
            self.router = router

        def forward(self, x: torch.Tensor) -> Any:
            router = self.router
            start = time.perf_counter_ns()
            result = router(x)
            taken = time.perf_counter_ns() - start
            if x.numel() == x.shape[-1]:
                times.append(taken)
            return result

    for layer in model.model.layers:
        layer.mlp.gate = Clock(layer.mlp.gate)
    return times


def turns_of(turns: int, hidden: int, tokens: int) -> dict[str, list[float]]:
    """Median us of a call in each turn, by sizes and model."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for experts, chosen in SIZES:
        entries = models(experts, chosen, hidden)
        clocks = {name: clocked(model) for name, model in entries.items()}
        for turn in range(-3, turns):  # the first three warm up
            for name, model in entries.items():
                clocks[name].clear()
                model.generate(
                    torch.tensor([[1, 2, 3]]),
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    do_sample=False,
                    pad_token_id=0,
                )
                if turn >= 0:
                    key = f"{name}, N {experts}"
                    found.setdefault(key, []).append(statistics.median(clocks[name]) / 1000)
    return found


def rows(found: dict[str, list[float]]) -> Iterator[str]:
    """Rows of a Markdown table."""
    for name, values in found.items():
        model, _, sizes = name.rpartition(", ")
        base = found[f"{STOCK.get(model, model)}, {sizes}"]
        ratios = sorted(value / stock for value, stock in zip(values, base, strict=True))
        middle, quarter = statistics.median(ratios), len(ratios) // 4
        width = f"{ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}"
        yield f"| {name} | {statistics.median(values):.1f} | {middle:.2f} | {width} |"


def main() -> int:
    """Measure this tree, and another in turns with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="src folder of another checkout")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print the times of one tree")
    given = parser.parse_args()
    if given.json:
        print(json.dumps(turns_of(given.turns, given.hidden, given.tokens)))
        return 0
    if given.against and not (given.against / "l2r").is_dir():
        parser.error(f"against must be a folder that holds l2r; got {given.against}")
    trees = {"this tree": HERE, **({str(given.against): given.against} if given.against else {})}
    merged: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
    per_process = 20
    for _ in range(max(1, given.turns // per_process)):
        for name, source in trees.items():
            sizes = ["--turns", str(per_process), "--hidden", str(given.hidden)]
            line = [sys.executable, __file__, "--json", *sizes, "--tokens", str(given.tokens)]
            environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                line, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            for key, values in json.loads(done.stdout.splitlines()[-1]).items():
                merged[name].setdefault(key, []).extend(values)
    for name, found in merged.items():
        print(f"\n{name}\n\n| router of | us | over stock | middle half |\n|---|---|---|---|")
        print("\n".join(rows(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
