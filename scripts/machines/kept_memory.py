"""What keeping freed memory brings to training: the same recipe with and without, in turns.

    python scripts/machines/kept_memory.py --recipe demo/l2r-sips --out results/cpu-2-threads

Writes kept-memory.json: tokens per second (median, lowest, highest of the logged steps after the
first two), peak resident memory, minor page faults and the last loss of every run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from l2r.cost.benchmarks.results import environment


def train(recipe: str, changes: list[str], *, keep: bool) -> dict[str, Any]:
    """One run in a process of its own."""
    settings = {**os.environ, "L2R_KEEP_MEMORY": "on" if keep else "off"}
    with tempfile.TemporaryDirectory() as room:
        command = [sys.executable, "-m", "l2r", "train", recipe, *changes, "--out", room]
        process = subprocess.Popen(
            command, env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            assert process.stderr is not None
            raise SystemExit(process.stderr.read().decode())
        lines = (Path(room) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    speeds = [record["per_second"] for record in steps if "per_second" in record][2:]
    return {
        "kept": keep,
        "tokens_per_second": statistics.median(speeds),
        "low": min(speeds),
        "high": max(speeds),
        "peak_mib": usage.ru_maxrss / 1024,
        "page_faults": usage.ru_minflt,
        "loss": steps[-1]["ce"],
    }


def main() -> None:
    """Alternate, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="demo/l2r-sips")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    records = []
    for _ in range(given.rounds):
        for keep in (True, False):
            records.append(train(given.recipe, [f"training.steps={given.steps}"], keep=keep))
            print(records[-1], flush=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        found = {"recipe": given.recipe, "environment": environment(), "records": records}
        (given.out / "kept-memory.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
