"""Time a router's calls in two source trees: one process after the other, in turns, one thread.

    python -m scripts.machines.two_trees OTHER/src [--turns 8] [--json out.json]

OTHER is a checkout of another commit (`git worktree add OTHER COMMIT`), this tree the other side.
Prints processor time per call, the least of five repeats and the median over the turns, and the
ratio of this tree to OTHER of each pair of turns: its median and range. "no holders" is this tree
with `holders = ()`, in the same process.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_HERE = Path(__file__).parents[2] / "src"
_WORK = """
import json, sys, time
import torch
from l2r.routers import RouterConfig, build_router

torch.set_num_threads(1)
times = {}
CALLS = {1: 200, 1024: 4}

def timed(call, calls):
    best = []
    for _ in range(5):
        start = time.process_time_ns()
        for _ in range(calls):
            call()
        best.append((time.process_time_ns() - start) / calls / 1000)
    return min(best)

for kind in ("linear", "l2r_sips"):
    torch.manual_seed(0)
    config = RouterConfig.from_dict({"kind": kind})
    router = build_router(config, hidden_size=2048, num_experts=64, top_k=8)
    own = type(router).__dict__.get("holders")
    for held in (True, False) if own else (True,):
        if own:
            router.holders = own if held else ()
        for tokens, calls in CALLS.items():
            x = torch.randn(tokens, 2048)
            trained = x.clone().requires_grad_()
            def forward():
                with torch.no_grad():
                    router(x)
            def both():
                logits, weights, _ = router(trained)
                (logits.sum() + weights.sum()).backward()
            name = f"{kind}{'' if held else ', no holders'}, {tokens} token{'s' * (tokens > 1)}"
            for what, call in (("forward", forward), ("forward and backward", both)):
                timed(call, max(1, calls // 8))
                times[f"{name}, {what}"] = timed(call, calls)
json.dump(times, sys.stdout)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not (given.other / "l2r").is_dir():
        parser.error(f"other must be a folder that holds l2r; got {given.other}")
    turns: dict[str, list[dict[str, float]]] = {"this": [], "other": []}
    for turn in range(given.turns):
        order = ("other", "this") if turn % 2 == 0 else ("this", "other")
        for side in order:
            turns[side].append(_times(_HERE if side == "this" else given.other))
    for line in _lines(turns["this"], turns["other"]):
        sys.stdout.write(line + "\n")
    if given.json:
        given.json.write_text(json.dumps(turns, indent=2) + "\n")
    return 0


def _times(source: Path) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": os.fspath(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", _WORK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout)
    return times


def _lines(this: list[dict[str, float]], other: list[dict[str, float]]) -> Iterator[str]:
    """Rows of a Markdown table; "no holders" is compared with the call that has them."""
    yield "| call | other, us | this, us | this / other | range |"
    yield "|---|---|---|---|---|"
    for name in this[0]:
        base = other if name in other[0] else this
        before = [turn[name.replace(", no holders", "")] for turn in base]
        after = [turn[name] for turn in this]
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        shown = f"{statistics.median(before):.1f} | {statistics.median(after):.1f}"
        yield (
            f"| {name} | {shown} | {statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} |"
        )


if __name__ == "__main__":
    raise SystemExit(main())
