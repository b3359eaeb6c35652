"""How cost grows with each size: router, layer, step, diagnosis, mismatch and memory.

    python -m benchmarks.growth [--out results/growth.json]

One thread. Processor time of one call in ms, the least of all repeats in several turns through
all sizes, as neighbours on a machine come and go; memory is the most that one
forward and backward of the router has out at once, in MiB. One size moves at a time, the others
stay at ``BASE``. Beside each stands what it cannot be under on this machine: multiplications over
the speed of a large matrix product, or the bytes of x read once (and its gradient written) over the
speed of a copy, both measured first. ``scripts/pages/growth_figure.py`` draws the result.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine_speed import machine_speed
from benchmarks.memory import traced_peak
from l2r.analysis.diagnostics import DiagnosisSettings, collect_records, diagnose_layers
from l2r.analysis.routes import compare_models, in_other_arithmetic
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.models.experts_backend import register_experts
from l2r.machine import describe_machine
from l2r.moe.layer import Experts, MoELayer
from l2r.routers import L2RConfig, build_router, capture

BASE = {"T": 256, "N": 32, "d": 128, "r": 2, "H": 4, "layers": 2}
AXES = {
    "T": [16, 64, 256, 1024],
    "N": [16, 64, 256, 1024],
    "d": [64, 128, 256, 512],
    "r": [2, 8, 32, 64],
    "H": [1, 4, 16, 64],
    "layers": [1, 2, 4, 8],
}
TOP_K, WIDTH, WORDS, ROW = 4, 64, 512, 64
Sizes = dict[str, int]
Step = Callable[[], object]


def calls(s: Sizes) -> Iterator[tuple[str, Step]]:
    """Every quantity at these sizes, by name."""
    router = build_router(_config(s), hidden_size=s["d"], num_experts=s["N"], top_k=TOP_K)
    x = torch.randn(s["T"], s["d"], requires_grad=True)

    def route() -> None:
        logits, weights, _ = router(x)
        torch.autograd.backward(logits.sum() + weights.square().sum())

    yield "router", route
    yield "memory", route
    layer = MoELayer(router, Experts(s["N"], s["d"], WIDTH))
    yield "layer", lambda: torch.autograd.backward(layer(x).square().sum())
    model = _model(s)
    ids = torch.randint(WORDS, (max(1, s["T"] // ROW), min(s["T"], ROW)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def train() -> None:
        with capture(model) as seen:
            task = model(input_ids=ids, labels=ids).loss
        logits, indices = seen.logits(), seen.indices()
        loss = task + 0.01 * load_balancing_loss(logits, indices) + 0.001 * router_z_loss(logits)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    yield "step", train
    settings = DiagnosisSettings(certify=0, keep_sample=False)

    def diagnose() -> None:
        diagnose_layers(collect_records(model, [{"input_ids": ids}]), settings=settings)

    yield "diagnosis", diagnose
    other = in_other_arithmetic(model, "bf16")
    yield "mismatch", lambda: compare_models(model, other, [ids])


def limits(s: Sizes, flops: float, bandwidth: float) -> dict[str, float]:
    """Least ms, and MiB, by name: what has to be multiplied, or read and written once."""
    tokens, width = s["T"], s["d"]
    router = s["d"] * s["r"] + s["N"] * s["H"] * s["r"]
    experts = TOP_K * 3 * width * WIDTH
    attention = 4 * width**2 + 2 * ROW * width
    forward = s["layers"] * (router + experts + attention) + width * WORDS
    x = 4.0 * tokens * width
    made = {"router": router, "layer": router + experts, "step": forward}
    ms = {name: 1e3 * 3 * 2 * tokens * count / flops for name, count in made.items()}
    ms["router"] = max(ms["router"], 1e3 * 2 * x / bandwidth)
    ms["diagnosis"] = 1e3 * 2 * tokens * forward / flops
    ms["mismatch"] = 3 * ms["diagnosis"]
    return {**ms, "memory": (x + 4.0 * tokens * s["N"]) / 2**20}


def _config(s: Sizes) -> L2RConfig:
    return L2RConfig(rank=s["r"], heads=s["H"])


def _model(s: Sizes) -> Any:
    config = L2rOlmoeConfig(
        vocab_size=WORDS,
        hidden_size=s["d"],
        intermediate_size=WIDTH,
        num_hidden_layers=s["layers"],
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=s["N"],
        num_experts_per_tok=TOP_K,
        pad_token_id=None,
        router=_config(s),
    )
    model = L2rOlmoeForCausalLM(config)
    model.set_experts_implementation(register_experts())
    return model


def least(step: Step, repeats: int) -> float:
    """Milliseconds of processor time; the first call is not counted."""
    step()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        step()
        best = min(best, time.process_time() - start)
    return 1e3 * best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/growth.json"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    speed = machine_speed("cpu", clock="cpu")
    records: dict[tuple[str, int, str], dict[str, Any]] = {}
    for turn in range(given.turns):
        for axis, value in ((axis, value) for axis, values in AXES.items() for value in values):
            sizes = {**BASE, axis: value}
            least_of = limits(sizes, speed.flops, speed.bytes)
            for name, call in calls(sizes):
                made = traced_peak(call) / 2**20 if name == "memory" else least(call, given.repeats)
                place = {"axis": axis, "value": value, "quantity": name}
                record = records.setdefault(
                    (axis, value, name), {**place, "measured": made, "limit": least_of[name]}
                )
                record["measured"] = min(made, record["measured"])
            print(f"turn {turn + 1}: {axis} {value}", flush=True)
    facts = {
        **describe_machine(),
        "flops": speed.flops,
        "bytes_per_second": speed.bytes,
        "base": BASE,
    }
    given.out.write_text(
        json.dumps({"environment": facts, "records": [*records.values()]}, indent=1) + "\n"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
