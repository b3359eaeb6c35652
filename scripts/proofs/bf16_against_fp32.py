"""Train a demo recipe, cut down, in fp32 and in bf16: both loss curves, and the dtypes inside.

    python scripts/proofs/bf16_against_fp32.py demo/l2r-sips
    python scripts/proofs/bf16_against_fp32.py demo-vision/l2r-sips --steps 30 seed=1
    torchrun --nproc-per-node=2 scripts/proofs/bf16_against_fp32.py demo/l2r-sips \\
        --parallel fsdp2 --precisions bf16 --out runs/bf16

``--out`` keeps the run folders and writes ``dtypes.json`` beside them; several processes need it,
and train in one precision per start.
"""

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.functional import grouped_mm
from torch.nn.modules.module import register_module_forward_hook

from l2r.files.folder import RunFolder
from l2r.moe import grouped
from l2r.routers import Router
from l2r_lab.training import loop
from l2r_lab.training import step as steps
from l2r_lab.training.objective import auxiliary_losses, expert_loads
from l2r_lab.training.recipes.load import load_recipe

PRECISIONS = ("fp32", "bf16")
LANGUAGE = [
    "data.sequence_length=32",
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.intermediate_size=16",
    "model.num_experts=8",
    "model.num_experts_per_tok=2",
    "optimizer.warmup=512",
]
VISION = [
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.intermediate_size=32",
    "model.moe_layers=[1]",
    "optimizer.warmup=32",
]
COMMON = [
    "training.global_batch=8",
    "training.micro_batch=2",
    "training.log_every=1",
    "evaluation.every=0",
    "evaluation.batch_size=4",
    "evaluation.max_batches=1",
    "optimizer.lr=0.005",
]


@contextmanager
def watch_dtypes() -> Iterator[dict[str, set[str]]]:
    """Dtypes met in training, by place: products of experts, routers, losses and statistics."""
    seen: dict[str, set[str]] = defaultdict(set)

    def note(place: str, *tensors: torch.Tensor) -> None:
        seen[place].update(str(t.dtype).removeprefix("torch.") for t in tensors)

    def routed(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, Router) and module.training:
            note("router logits", output.logits)
        elif isinstance(module, nn.Linear) and module.training:
            note("linear layers", output)

    def watched_product(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        result = grouped_mm(a, b, **options)
        if torch.is_grad_enabled():
            note("expert products", a, b, result)
        return result

    def watched_losses(*args: Any, **options: Any) -> Any:
        total, parts = auxiliary_losses(*args, **options)
        note("router losses", total, *parts.values())
        return total, parts

    def watched_loads(*args: Any) -> Any:
        result = expert_loads(*args)
        note("statistics", *(load for calls in result.values() for load in calls))
        return result

    hook = register_module_forward_hook(routed)
    try:
        with (
            mock.patch.object(grouped, "grouped_mm", watched_product),
            mock.patch.object(steps, "auxiliary_losses", watched_losses),
            mock.patch.object(steps, "expert_loads", watched_loads),
        ):
            yield seen
    finally:
        hook.remove()


def run(
    recipe: str, precision: str, parallel: str, steps: int, changes: list[str], folder: Path
) -> dict[str, list[str]]:
    """Train one cell into ``folder``; the dtypes by place."""
    sizes = VISION if "vision" in recipe else LANGUAGE
    own = [f"training.precision={precision}", f"training.parallel={parallel}"]
    cell = load_recipe(recipe, [*COMMON, *sizes, *own, f"training.steps={steps}", *changes])
    with watch_dtypes() as seen:
        loop.train(cell, folder, show_progress=False)
    return {place: sorted(dtypes) for place, dtypes in sorted(seen.items())}


def curve(folder: Path) -> list[float]:
    """Task loss of every step."""
    return [record["ce"] for record in RunFolder(folder).read_metrics("train")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--parallel", default="ddp", choices=("ddp", "fsdp2"))
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--out", type=Path)
    options, changes = parser.parse_known_args()
    torch.set_num_threads(1)
    first = int(os.environ.get("RANK", "0")) == 0
    with tempfile.TemporaryDirectory() as temporary:
        root = options.out or Path(temporary)
        dtypes = {
            p: run(options.recipe, p, options.parallel, options.steps, changes, root / p)
            for p in options.precisions
        }
        if first:
            (root / "dtypes.json").write_text(json.dumps(dtypes))
            report(options.recipe, options.parallel, dtypes, root)


def report(recipe: str, parallel: str, dtypes: dict[str, dict[str, list[str]]], root: Path) -> None:
    """The curves side by side and the dtypes, as Markdown."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    print(f"\n{recipe}, {ranks} process(es){f', {parallel}' if ranks != '1' else ''}\n")
    curves = {precision: curve(root / precision) for precision in dtypes}
    print("| step | " + " | ".join(curves) + " | difference |\n" + "|---" * (len(curves) + 2) + "|")
    for step, losses in enumerate(zip(*curves.values(), strict=True), start=1):
        numbers = " | ".join(f"{loss:.4f}" for loss in losses)
        print(f"| {step} | {numbers} | {losses[-1] - losses[0]:+.4f} |")
    print("\n| place | " + " | ".join(dtypes) + " |\n" + "|---" * (len(dtypes) + 1) + "|")
    for place in next(iter(dtypes.values())):
        print(f"| {place} | " + " | ".join(", ".join(d[place]) for d in dtypes.values()) + " |")


if __name__ == "__main__":
    main()
