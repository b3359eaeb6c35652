"""What add_router_statistics costs a step of transformers' Trainer, in processor time.

    OMP_NUM_THREADS=1 python scripts/machines/callback_cost.py --out results/cpu

One run of a stock OLMoE: every second step is watched, so that watched and bare steps see the same
machine. Prints, and writes into callback.json, the median of the paired ratios (a watched step over
the bare one before it) with its quartiles, and what that comes to when every tenth step is logged.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    OlmoeConfig,
    OlmoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from l2r.engines.trainer import add_router_statistics

SIZES: dict[str, dict[str, int]] = {
    "d 128, 4 layers of 16 experts, 2,048 tokens": {
        "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_experts": 16, "num_experts_per_tok": 4,
    },
    "d 512, 4 layers of 64 experts, 2,048 tokens": {
        "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_experts": 64, "num_experts_per_tok": 8,
    },
}  # fmt: skip
EVERY = 10


class Clock(TrainerCallback):
    """Processor time at the end of every step, after the callbacks that stand before it."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.process_time())


def ratios(sizes: dict[str, int], steps: int) -> list[float]:
    """Watched over bare, of every pair of steps but the first two."""
    torch.manual_seed(0)
    model = OlmoeForCausalLM(OlmoeConfig(vocab_size=4096, **sizes, pad_token_id=1, eos_token_id=0))
    rows = torch.randint(2, 4096, (16 * steps, 128))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            logging_steps=steps,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        add_router_statistics(trainer, every=2)
        clock = Clock()
        trainer.add_callback(clock)
        trainer.train()
    seconds = [end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False)]
    # Step 1 ended first: seconds[0] is step 2, which is watched, as are all even ones.
    return [seconds[n] / seconds[n - 1] for n in range(4, len(seconds), 2)]


def main() -> None:
    """Measure all sizes, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    found = {}
    for name, sizes in SIZES.items():
        low, middle, high = statistics.quantiles(ratios(sizes, given.steps), n=4)
        found[name] = {
            "watched over bare": middle,
            "quartiles": [low, high],
            f"share of a run, every {EVERY} steps": (middle - 1) / EVERY,
        }
        print(name, json.dumps(found[name]))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "callback.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
