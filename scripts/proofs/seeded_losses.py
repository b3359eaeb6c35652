"""Losses of short seeded runs in two source trees, to the last digit.

    python scripts/proofs/seeded_losses.py BEFORE AFTER [--steps 30] [--only demo/linear]

BEFORE and AFTER are checkouts of this repository. Every demo recipe is trained for a few steps by
each checkout's own `l2r train`, one thread, on one machine; every number that both wrote
into metrics.jsonl must be the same float. Exit code 1 names what differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROUTERS = ("linear", "linear-sips", "xmoe", "l2r-dot", "l2r-cosine", "l2r-sips")
RECIPES = [f"{demo}/{router}" for demo in ("demo", "demo-vision") for router in ROUTERS]
NUMBERS = ("ce", "balance", "z", "grad_norm", "ce/mean", "top1")


def losses(checkout: Path, recipe: str, steps: int) -> dict[tuple[Any, ...], float]:
    """(kind, step, name) -> number of one run."""
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"training.steps={steps}", "training.log_every=1", "evaluation.every=0"]
        command = [sys.executable, "-m", "l2r", "train", recipe, *changes, "--out", "run"]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    records = list(map(json.loads, lines))
    return {(r["kind"], r["step"], n): r[n] for r in records for n in NUMBERS if n in r}


def main() -> int:
    """Compare, print a line per recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", action="append", help="a recipe; may be repeated")
    options = parser.parse_args()
    before, after = options.before.resolve(), options.after.resolve()
    failed = False
    for recipe in options.only or RECIPES:
        old, new = losses(before, recipe, options.steps), losses(after, recipe, options.steps)
        both = [key for key in old if key in new]
        different = [key for key in both if old[key] != new[key]]
        failed |= bool(different) or not both
        if different:
            key, names = different[0], sorted({name for _, _, name in different})
            largest = max(abs(old[key] - new[key]) / abs(old[key]) for key in different)
            print(
                f"{recipe:24} {len(different)} of {len(both)} numbers differ ({', '.join(names)}), "
                f"relatively by {largest:.1e} at most; first {key}: {old[key]!r}, {new[key]!r}"
            )
        else:
            last = max(key for key in both if key[2] == "ce" and key[0] == "train")
            print(f"{recipe:24} {len(both)} numbers identical; last training loss {old[last]!r}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
