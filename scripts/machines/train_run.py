"""A short real training run of small/gpu-*: speed, memory, loss and exact resume on this machine.

    python scripts/machines/train_run.py --recipe small/gpu-l2r-sips --steps 60 --out FOLDER

Trains on the embedded text instead of OLMoE-mix tokens, with validation, a checkpoint half way and
a second run that resumes from it; writes train-NAME.json. The losses after the resume must be those
of the uninterrupted run. Needs no command-line packages, so that it runs on a bare GPU machine.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from l2r_lab.timing import environment
from l2r_lab.training.loop import train
from l2r_lab.training.recipes.load import load_recipe


def records(folder: Path) -> list[dict[str, Any]]:
    """Logged training steps of a run folder."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def link_if_large(source: str, target: str) -> None:
    """Copy a small file; link a large one, which is never written again."""
    if Path(source).stat().st_size > 2**20:
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def main() -> None:
    """Train, resume from the middle in a copy, compare, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="small/gpu-l2r-sips")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--changes", nargs="*", default=[], help="key.sub=value ...")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    half = given.steps // 2
    changes = [
        "data.tokens=[]", "data.validation_tokens=[]", "data.tokenizer=null",
        "data.corpus=embedded", "data.vocab_size=4096", "model.vocab_size=null",
        "data.sequence_length=512", "training.global_batch=32", "training.micro_batch=16",
        f"training.steps={given.steps}", "training.log_every=1",
        "optimizer.warmup=100000", f"evaluation.every={given.steps}", "evaluation.max_batches=4",
        f"checkpoint.every={half}", "checkpoint.keep=3", *given.changes,
    ]  # fmt: skip
    recipe = load_recipe(given.recipe, changes)
    with tempfile.TemporaryDirectory() as room:
        whole, again = Path(room) / "whole", Path(room) / "again"
        train(recipe, whole, show_progress=False)
        later = shutil.ignore_patterns("model", f"*{given.steps}")
        shutil.copytree(whole, again, ignore=later, copy_function=link_if_large)
        train(recipe, again, show_progress=False)
        first, second = records(whole), records(again)
    after = [r["ce"] for r in first if r["step"] > half]
    resumed = [r["ce"] for r in second if r["step"] > half]
    speeds = [r["per_second"] for r in first[len(first) // 4 :]]
    found = {
        "recipe": given.recipe,
        "changes": changes,
        "environment": environment(),
        "first_loss": first[0]["ce"],
        "last_loss": first[-1]["ce"],
        "tokens_per_second": statistics.median(speeds),
        "peak_gpu_mib": torch.cuda.max_memory_allocated() / 2**20
        if torch.cuda.is_available()
        else None,
        "largest_gap_after_resume": max(
            abs(a - b) for a, b in zip(after, resumed[-len(after) :], strict=True)
        ),
    }
    print(json.dumps({k: v for k, v in found.items() if k not in ("changes", "environment")}))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        name = given.recipe.replace("/", "-")
        (given.out / f"train-{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    assert found["last_loss"] < found["first_loss"], "the loss did not fall"


if __name__ == "__main__":
    main()
