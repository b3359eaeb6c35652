"""Losses of short seeded runs in two source trees, to the last digit.

    python scripts/seeded_losses.py BEFORE AFTER [--steps 30] [--only demo/linear]

BEFORE and AFTER are checkouts of this repository. Every demo recipe is trained for a few steps by
each checkout's own `l2r train`, one thread, on one machine; every number of metrics.jsonl that
training and validation wrote must be the same float. Exit code 1 names what differs.
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


def losses(checkout: Path, recipe: str, steps: int) -> list[tuple[Any, ...]]:
    """Rows (kind, step, name, value) of one run."""
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"training.steps={steps}", "training.log_every=1", "evaluation.every=0"]
        command = [sys.executable, "-m", "l2r", "train", recipe, *changes, "--out", "run"]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = []
    for record in map(json.loads, lines):
        rows += [(record["kind"], record["step"], n, record[n]) for n in NUMBERS if n in record]
    return rows


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
        different = [(a, b) for a, b in zip(old, new, strict=False) if a != b]
        if len(old) != len(new) or different:
            failed = True
            first = different[0] if different else f"{len(old)} and {len(new)} numbers"
            print(f"{recipe:24} differs in {len(different)} of {len(old)}, first: {first}")
        else:
            last = [row for row in old if row[2] == "ce"][-1]
            print(f"{recipe:24} {len(old)} numbers identical; last training loss {last[3]!r}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
