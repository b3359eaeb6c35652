"""What capture, losses, statistics and bias balancing cost a training step of a stock model.

    python -m scripts.machines.loop_cost --minutes 20 --markdown docs/your-loop.md

Width 512, 8 layers, 64 experts of which 8 are chosen, 1,024 tokens, float32, one process, processor
time. Twice: what is added timed by itself, and whole steps. There each round takes one step of
every kind, in another order; a cost is the median of the differences to the plain step of the same
round, with the interval in which the median lies with 95%, by the order of the differences.
"""

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import l2r
from l2r.analysis.diagnostics import router_statistics
from scripts.pages.marks import with_section

LAYERS, TOKENS = 8, 1024
LEAST = 7  # rounds, one to warm up: of six differences the interval is the whole range
PLAIN, CAPTURE, STATISTICS, BALANCING = (
    "plain", "`capture`", "`router_statistics`", "`bias_balancing`, with `step()`",
)  # fmt: skip
LOSSES = "`router_losses`, balance and z, with backward"
SEQUENCE, STEP = 'the same, `balance_scope="sequence"`', 'the same, `"step"`, loads given'
PINS = "`pin_routes`"
SIZES = {
    "vocab_size": 1024, "hidden_size": 512, "moe_intermediate_size": 256,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_experts_per_tok": 8,
}  # fmt: skip


def model_of(biased: bool) -> torch.nn.Module:
    """A stock model in training; the second has a selection bias in every layer."""
    torch.manual_seed(0)
    if not biased:
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SIZES, num_experts=64, num_key_value_heads=8, head_dim=64)
        ).train()
    ranks = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32}
    heads = {"qk_rope_head_dim": 32, "v_head_dim": 64, "num_key_value_heads": 8}
    experts = {"n_routed_experts": 64, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**SIZES, **ranks, **heads, **experts, first_k_dense_replace=0)
    ).train()


def steps_of(
    model: torch.nn.Module, ids: torch.Tensor, biased: bool
) -> dict[str, Callable[[], None]]:
    """One training step of every kind, without the optimizer, which is the same in all."""

    def plain() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def with_capture() -> None:
        with l2r.capture(model):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    def with_losses(**settings: Any) -> None:
        with l2r.capture(model) as captured:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        whole: Any = loss + l2r.router_losses(captured, balance=0.01, **settings).total
        whole.backward()

    def with_statistics() -> None:
        with l2r.capture(model) as captured:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        router_statistics(captured).scalars()
        loss.backward()

    def with_pins() -> None:
        with l2r.pin_routes(model):
            plain()

    kinds: dict[str, Callable[[], None]] = {PLAIN: plain}
    if not biased:
        with torch.no_grad(), l2r.step_loads(model) as loads:
            model(input_ids=ids, use_cache=False)
        return kinds | {
            CAPTURE: with_capture,
            LOSSES: lambda: with_losses(z=0.001),
            SEQUENCE: lambda: with_losses(z=0.001, balance_scope="sequence"),
            STEP: lambda: with_losses(z=0.001, balance_scope="step", loads=loads),
            STATISTICS: with_statistics,
            PINS: with_pins,
        }

    def with_balancing() -> None:
        balancing.start(model)
        plain()
        balancing.step()
        balancing.stop()

    balancing = l2r.bias_balancing(model)
    balancing.stop()
    return kinds | {BALANCING: with_balancing}


def compare(biased: bool, seconds: float) -> tuple[float, dict[str, list[float]]]:
    """Seconds of a plain step, and the differences to that of the same round, by kind."""
    model, ids = model_of(biased), torch.randint(1024, (2, TOKENS // 2))
    steps = steps_of(model, ids, biased)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, chance, end = list(steps), random.Random(0), time.monotonic() + seconds
    while len(times[PLAIN]) < LEAST or time.monotonic() < end:
        chance.shuffle(order)
        for name in order:
            model.zero_grad(set_to_none=False)
            start = time.process_time()
            steps[name]()
            times[name].append(time.process_time() - start)
    plain = times.pop(PLAIN)[1:]  # the first round warms up
    return statistics.median(plain), {
        name: [one - base for one, base in zip(each[1:], plain, strict=True)]
        for name, each in times.items()
    }


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Two of the values between which the median lies with 95% at least, whatever they are of."""
    ordered, below = sorted(values), 0.0
    for rank in range(len(ordered) // 2 + 1):
        below += math.comb(len(ordered), rank) / 2 ** len(ordered)
        if below > 0.025:
            return ordered[max(rank - 1, 0)], ordered[min(-rank, -1)]
    return ordered[0], ordered[-1]


def alone(biased: bool, rounds: int = 40) -> dict[str, float]:
    """Seconds of the parts that are added, without the model, whose noise is larger."""
    model, ids = model_of(biased), torch.randint(1024, (2, TOKENS // 2))
    with torch.no_grad(), l2r.step_loads(model) as loads, l2r.capture(model) as captured:
        model(input_ids=ids, labels=ids, use_cache=False)
    leaves = {
        path: [o._replace(logits=o.logits.detach().requires_grad_()) for o in outputs]
        for path, outputs in captured.outputs.items()
    }
    captured.outputs = leaves

    def enter() -> None:
        with l2r.capture(model) as seen:
            for path, (output,) in leaves.items():
                seen.add(captured.sites[path], ids, output, captured.calls[path][0])

    def losses(**settings: Any) -> None:
        total: Any = l2r.router_losses(captured, balance=0.01, **settings).total
        total.backward()

    parts: dict[str, Callable[[], object]] = {
        CAPTURE: enter,
        LOSSES: lambda: losses(z=0.001),
        SEQUENCE: lambda: losses(z=0.001, balance_scope="sequence"),
        STEP: lambda: losses(z=0.001, balance_scope="step", loads=loads),
        STATISTICS: lambda: router_statistics(captured).scalars(),
    }
    if biased:
        balancing = l2r.bias_balancing(model)
        balancing.stop()

        def balance() -> None:
            for path, (output,) in leaves.items():
                balancing._see(captured.sites[path], ids, output, captured.calls[path][0])
            balancing.step()

        parts = {BALANCING: balance}
    times: dict[str, list[float]] = {name: [] for name in parts}
    for round_ in range(rounds + 1):
        for name, part in parts.items():
            start = time.process_time()
            part()
            if round_:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def table(
    plain: Sequence[float], parts: dict[str, float], whole: dict[str, list[float]], load: float
) -> str:
    """Both measurements, a row a part."""
    lines = [
        f"Processor time, one thread, a stock model of {LAYERS} layers, 64 experts (8 chosen), "
        f"width 512 and {TOKENS:,}",
        f"tokens; forward and backward take {plain[0]:.1f} s ({BALANCING}: {plain[1]:.1f} s). "
        f"Whole steps: median of",
        f"{min(map(len, whole.values()))} or more differences to the plain step of the same round, "
        f"95% interval (load of the machine {load:.0f}).",
        "",
        "| part | µs a layer | of the step | whole steps |",
        "|---|---|---|---|",
    ]
    for part, differences in whole.items():
        base = plain[part == BALANCING]
        low, high = median_interval(differences)
        middle = statistics.median(differences)
        shares = [f"{100 * value / base:+.1f}" for value in (middle, low, high)]
        whole_step = f"{shares[0]}% ({shares[1]} to {shares[2]})"
        if part in parts:
            seconds = parts[part]
            own = f"{seconds / LAYERS * 1e6:,.0f} | {100 * seconds / base:.2f}%"
        else:
            own = " | "
        lines.append(f"| {part} | {own} | {whole_step} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10, help="of whole steps, about (10)")
    parser.add_argument("--markdown", type=Path, help="the page whose section is written")
    given = parser.parse_args()
    parts: dict[str, float] = {}
    plain: list[float] = []
    whole: dict[str, list[float]] = {}
    for biased, share in ((False, 0.8), (True, 0.2)):
        parts |= alone(biased)
        base, differences = compare(biased, given.minutes * 60 * share)
        plain.append(base)
        whole |= differences
    section = table(plain, parts, whole, os.getloadavg()[2])
    print(section)
    if given.markdown:
        page = given.markdown.read_text(encoding="utf-8")
        given.markdown.write_text(with_section(page, "loop cost", section), encoding="utf-8")


if __name__ == "__main__":
    main()
