"""Train small MoE models with and without bias balancing, into results/balancing.jsonl.

    PYTHONPATH=. python -m scripts.others.balance_runs
    PYTHONPATH=. python -m scripts.pages.balance_figure

Three families that hold the selection bias in different places, from random weights, on the
embedded text of the demo, in transformers' Trainer: with nothing, with ``add_bias_balancing``, and
with a balance loss of 0.01. An arm's seeds start from the same weights and see the same rows as
another's. deepseek_v3 runs in a loop written out here too. Cells that the file holds are not run
again.
"""

import argparse
import json
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import l2r
from l2r.analysis.diagnostics import RouterWatch
from l2r.engines.trainer import add_bias_balancing, add_router_losses, add_router_statistics
from l2r.hf.models.experts_backend import register_experts
from l2r.hf.swap import find_sites, selection_biases
from l2r.routers import step_loads
from l2r.text.corpus import CorpusOptions, build_corpus
from l2r.text.tokens import TokenDataset

OUT = Path(__file__).resolve().parents[2] / "results" / "balancing.jsonl"
LENGTH, BATCH, EVERY, HELD_OUT = 64, 8, 4, 512
RATE, WARMUP, SPEED, BALANCE = 3e-3, 20, 0.001, 0.01
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
    "use_cache": False,
}
FAMILIES: dict[str, dict[str, Any]] = {  # the first layer is dense in all
    "deepseek_v3": {
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 16,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "lfm2_moe": {
        "num_experts": 16,
        "num_dense_layers": 1,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "layer_types": ["conv", "full_attention", "conv"],
    },
}
ARMS = ("plain", "bias", "loss")


def main() -> None:
    """Run the cells that are missing, seed by seed, and append each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--families", default=",".join(FAMILIES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(options.seeds):
        for family in options.families.split(","):
            for arm in ARMS:
                run(options.out, family, arm, seed, options.steps, "Trainer")
            if family == "deepseek_v3":
                run(options.out, family, "bias", seed, options.steps, "loop")


def run(out: Path, family: str, arm: str, seed: int, steps: int, way: str) -> None:
    """One cell: loads of each layer by step, and loads and cross-entropy of the held-out text."""
    key = {"family": family, "arm": arm, "seed": seed, "steps": steps, "way": way}
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    if any(all(cell[name] == value for name, value in key.items()) for cell in done):
        return
    begun = time.process_time()
    model = made(family, seed)
    curve = (in_trainer if way == "Trainer" else in_a_loop)(model, arm, seed, steps)
    seconds = time.process_time() - begun
    cell = {**key, "seconds": round(seconds, 1), "curve": curve, **held_out(model)}
    spans = [float(bias.max() - bias.min()) for bias in selection_biases(model).values()]
    cell["bias_span"] = max(spans)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(cell) + "\n")
    print({**key, "seconds": cell["seconds"], "ce": cell["ce"], "maxvio": cell["maxvio"]})


def made(family: str, seed: int) -> Any:
    """A model of random weights; its biases begin at zero."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**_SIZES, **FAMILIES[family], vocab_size=vocabulary())
    model = AutoModelForCausalLM.from_config(config).train()
    model.set_experts_implementation(register_experts())
    assert all(not bias.any() for bias in selection_biases(model).values())
    return model


@cache
def data() -> tuple[TokenDataset, TokenDataset]:
    """Training and held-out rows of the demo's corpus."""
    options = CorpusOptions(vocab_size=1024, characters_per_domain=1_000_000)
    corpus = build_corpus(options, report=print)
    return TokenDataset(corpus.train, LENGTH), TokenDataset(corpus.validation, LENGTH)


def vocabulary() -> int:
    """Number of tokens of the corpus."""
    return int(data()[0].tokenizer.vocab_size)


def batches(seed: int, steps: int) -> Iterator[Tensor]:
    """Token ids of each step."""
    train, _ = data()
    for step in range(steps):
        yield train.rows(train.batch(step, BATCH, seed))["input_ids"]


def in_trainer(model: Any, arm: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """Train by transformers' Trainer."""
    rows = [{"input_ids": row, "labels": row} for ids in batches(seed, steps) for row in ids]
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE,
            lr_scheduler_type="cosine", warmup_steps=WARMUP, logging_steps=EVERY, use_cpu=True,
            report_to="none", save_strategy="no", disable_tqdm=True, seed=seed,
            dataloader_pin_memory=False, train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows)
        add_router_statistics(trainer)
        if arm == "bias":
            add_bias_balancing(trainer, speed=SPEED)
        if arm == "loss":
            add_router_losses(trainer, balance=BALANCE)
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [_point(line["step"], line) for line in lines]


def in_a_loop(model: Any, arm: str, seed: int, steps: int) -> list[dict[str, Any]]:
    """The same with bias balancing in a loop of one's own."""
    assert arm == "bias"
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, steps)
    watch, points = RouterWatch(model), []
    with l2r.bias_balancing(model, speed=SPEED) as balancing:
        for step, ids in enumerate(batches(seed, steps), start=1):
            if step % EVERY == 0:
                watch.start()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            balancing.step()
            schedule.step()
            optimizer.zero_grad()
            if statistics := watch.read() if step % EVERY == 0 else None:
                points.append(_point(step, statistics.scalars()))
    return points


def _point(step: int, numbers: Any) -> dict[str, Any]:
    """MaxVio of each layer: the largest load over the mean load, less one."""
    name = "router/max_over_mean/layer-"
    found = {key.removeprefix(name): value - 1 for key, value in numbers.items() if name in key}
    return {"step": step, "maxvio": {layer: round(value, 4) for layer, value in found.items()}}


@torch.no_grad()
def held_out(model: Any) -> dict[str, Any]:
    """Cross-entropy over held-out rows, spread over the whole, and MaxVio of each layer on them."""
    model.eval()
    _, rows = data()
    chosen = torch.linspace(0, len(rows) - 1, HELD_OUT).long().tolist()
    losses = []
    with step_loads(model) as loads:
        for first in range(0, HELD_OUT, 32):
            ids = rows.rows(chosen[first : first + 32])["input_ids"]
            losses.append(float(model(input_ids=ids, labels=ids).loss))
    layers = {site.path: site.layer for site in find_sites(model)}
    peaks = {
        str(layers[path]): float(counts.max() / counts.float().mean() - 1)
        for path, counts in loads.counts.items()
    }
    return {"ce": sum(losses) / len(losses), "maxvio": peaks}


if __name__ == "__main__":
    main()
