"""Upcycling against copying nothing: agreement and perplexity for several ranks and heads.

    python scripts/proofs/upcycle.py CHECKPOINT --grid 2x4,2x16,8x16 --train-steps 60

Every setting is run twice on the same text, with the fit and with freshly drawn routers, both
followed by the same joint training; the first row trains the original model alike, which needs
routers of ours in it (capture). Prints a Markdown table and writes the records as JSON.
"""

import argparse
import copy
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from l2r import L2RConfig
from l2r.hf.checkpoints import load_causal_lm
from l2r.report.tables import Table
from l2r.training.data.sample_text import sample_batches
from l2r.training.fit_batches import perplexity
from l2r.training.fit_options import FitOptions, JointOptions
from l2r.training.seen_text import unseen_part
from l2r.training.upcycling import train_jointly, upcycle

COLUMNS = (
    "rank",
    "heads",
    "start",
    "agreement",
    "KL",
    "swapped",
    "fitted",
    "trained",
    "fit seconds",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--grid", default="2x4,2x16,4x16,8x16", help="RANKxHEADS by commas")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--held-out", type=int, default=40_000)
    parser.add_argument("--train-steps", type=int, default=60)
    parser.add_argument("--train-lr", type=float, default=1e-4)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("upcycle.json"))
    args = parser.parse_args()
    model, tokenizer = load_causal_lm(args.checkpoint)
    batches, held_out = sample_batches(
        tokenizer,
        corpus=unseen_part(args.checkpoint),
        tokens=args.tokens,
        held_out_tokens=args.held_out,
        sequence_length=args.sequence_length,
    )
    control = copy.deepcopy(model)
    joint = JointOptions(args.train_steps, args.train_lr)
    train_jointly(control, batches, joint, lambda *_: None)
    original, trained = perplexity(model, held_out), perplexity(control, held_out)
    records: list[dict[str, object]] = [{"start": "original", "trained": trained}]
    rows: list[tuple[object, ...]] = []
    rows.append(("-", "-", "original", 1.0, 0.0, None, original, trained, None))
    for cell in args.grid.split(","):
        rank, heads = (int(part) for part in cell.split("x"))
        for start, updates in (("fitted", 4), ("drawn", 0)):
            torch.manual_seed(0)
            began = time.perf_counter()
            fitted_at: list[float] = []
            result = upcycle(
                copy.deepcopy(model),
                L2RConfig(rank=rank, heads=heads),
                batches,
                held_out,
                options=FitOptions(updates=updates),
                joint=joint,
                report=partial(note_fit, fitted_at),
            )
            divergence = sum(layer.divergence for layer in result.layers) / len(result.layers)
            ppl = result.perplexity
            stages = (ppl["swapped"], ppl.get("fitted"), ppl.get("trained"))
            seconds = fitted_at[-1] - began if fitted_at else None
            rows.append((rank, heads, start, result.agreement, divergence, *stages, seconds))
            records.append({"rank": rank, "heads": heads, "start": start, **asdict(result)})
            sys.stderr.write(f"{rows[-1]}\n")
    caption = f"Perplexity of the original on the same held-out text: {original:.2f}."
    args.out.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    print(Table("Upcycling", COLUMNS, tuple(rows), digits=3).to_markdown(), caption, sep="\n")


def note_fit(times: list[float], stage: str, done: int, total: int, note: str = "") -> None:
    """Keep the time of a message about the fit; the last is that of its end."""
    if stage == "fit":
        times.append(time.perf_counter())


if __name__ == "__main__":
    main()
